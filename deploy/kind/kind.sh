#!/usr/bin/env bash
# Tandem on a Kubernetes in containers of this machine, with workers on CPUs: builds the images, creates the cluster, installs
# KubeRay's operator and the chart, waits until it serves and runs the chart's tests.
#
#   kind.sh [--print] up      keeps what exists and updates settings; to update code, run down and up
#   kind.sh [--print] down    delete the cluster and everything in it
#
# --print prints the commands and runs none. The authors had no container engine: the commands were only printed, and
# run with fake programs that record them.
#
# It needs docker, kind (v0.33 or later), kubectl and helm, some 12 GiB of memory and 15 GiB of disk, and takes as long as
# two image builds and a model download by every pod. TANDEM_TORCH_INDEX, an index of CPU wheels, makes the worker image
# gigabytes smaller.
set -Eeuo pipefail
cd "$(dirname "$0")/../.."

CLUSTER=tandem
RELEASE=tandem
NAMESPACE=tandem
CONTEXT=kind-$CLUSTER
CHART=helm/tandem
VALUES=$CHART/ci/cpu-trial-values.yaml
# One of the node images of kind v0.33.0.
NODE=kindest/node:v1.37.0@sha256:a1ed56cfb0e7b93589bdf97c8cd566405a265939e3620fc4f5de89adff580ae5
KUBERAY=1.7.1
KUBERAY_CHARTS=https://ray-project.github.io/kuberay-helm/
TOOLS=(docker kind kubectl helm)

is_printed=""

usage() { sed -n 's/^#   kind.sh/kind.sh/p' "$0" >&2; }

say() { printf '\n%s\n' "$*"; }

run() {
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    [ -n "$is_printed" ] || "$@"
}

require_tools() {
    [ -z "$is_printed" ] || return 0
    local tool missing=()
    for tool in "${TOOLS[@]}"; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    if [ ${#missing[@]} -gt 0 ]; then
        echo "kind.sh needs ${missing[*]}, which this machine does not have." >&2
        return 1
    fi
    if ! docker info >/dev/null 2>&1; then
        echo "kind.sh needs docker, which does not answer: is it running, and may you use it?" >&2
        return 1
    fi
}

has_cluster() {
    [ -z "$is_printed" ] && kind get clusters 2>/dev/null | grep -qx "$CLUSTER"
}

# Diagnostics for a failed run.
tell_failure() {
    [ -z "$is_printed" ] || return 0
    say "It failed. This is what is there:" >&2
    kubectl --context "$CONTEXT" -n "$NAMESPACE" get rayservice,pods -o wide >&2 || true
    kubectl --context "$CONTEXT" -n "$NAMESPACE" describe rayservice >&2 || true
    kubectl --context "$CONTEXT" -n "$NAMESPACE" get events --sort-by=.lastTimestamp >&2 || true
}

build_images() {
    local index=()
    [ -z "${TANDEM_TORCH_INDEX:-}" ] || index=(--build-arg "TANDEM_TORCH_INDEX=$TANDEM_TORCH_INDEX")
    run docker build --file deploy/Dockerfile.gateway --tag "tandem-gateway:$1" .
    run docker build --file deploy/Dockerfile.worker --target cpu ${index[@]+"${index[@]}"} --tag "tandem-worker:$1" .
}

install_kuberay() {
    run helm --kube-context "$CONTEXT" upgrade --install kuberay-operator kuberay-operator \
        --repo "$KUBERAY_CHARTS" --version "$KUBERAY" --namespace kuberay --create-namespace --wait --timeout 10m
}

install_tandem() {
    run helm --kube-context "$CONTEXT" upgrade --install "$RELEASE" "$CHART" --values "$VALUES" \
        --namespace "$NAMESPACE" --create-namespace --timeout 10m
    run kubectl --context "$CONTEXT" -n "$NAMESPACE" wait "rayservice/$RELEASE" --for=condition=Ready --timeout=20m
    run kubectl --context "$CONTEXT" -n "$NAMESPACE" rollout status "deployment/$RELEASE-gateway" --timeout=15m
    run helm --kube-context "$CONTEXT" test "$RELEASE" --namespace "$NAMESPACE" --logs --timeout 15m
}

up() {
    local version
    version=$(sed -n 's/^appVersion: *"\{0,1\}\([^"]*\)"\{0,1\}$/\1/p' "$CHART/Chart.yaml")
    require_tools
    trap tell_failure ERR
    build_images "$version"
    has_cluster || run kind create cluster --name "$CLUSTER" --image "$NODE" --config deploy/kind/cluster.yaml --wait 5m
    run kind load docker-image --name "$CLUSTER" "tandem-gateway:$version" "tandem-worker:$version"
    install_kuberay
    install_tandem
    [ -z "$is_printed" ] || return 0
    say "Tandem serves. What to do next:"
    helm --kube-context "$CONTEXT" get notes "$RELEASE" --namespace "$NAMESPACE"
    say "kubectl's context is $CONTEXT. deploy/kind/kind.sh down deletes all of it."
}

down() {
    require_tools
    run kind delete cluster --name "$CLUSTER"
}

if [ "${1:-}" = --print ]; then
    is_printed=yes
    shift
fi
case "${1:-} $#" in
"up 1") up ;;
"down 1") down ;;
*)
    usage
    exit 2
    ;;
esac
