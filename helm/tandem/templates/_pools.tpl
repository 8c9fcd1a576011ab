{{/* Pools of workers and their worker groups. */}}

{{/* A pool with its defaults, but without its pod: list of context and name. */}}
{{- define "tandem.pool" -}}
{{- $root := first . -}}
{{- $pool := mergeOverwrite (deepCopy $root.Values.poolDefaults) (get $root.Values.pools (last .) | default dict) -}}
{{- $_ := set $pool "name" (last .) -}}
{{- $_ := set $pool "ranks" (int (default (max 1 (int $pool.gpus)) $pool.tensorParallel)) -}}
{{- /* Ranks and GPUs of the pool in each of its pods. */ -}}
{{- $_ := set $pool "podRanks" (div (mul $pool.ranks $pool.replicasPerPod) $pool.podsPerWorker | int) -}}
{{- $_ := set $pool "podGpus" (div (mul $pool.gpus $pool.replicasPerPod) $pool.podsPerWorker | int) -}}
{{- $_ := set $pool "least" (int (ternary $pool.replicas $pool.minReplicas (lt (int $pool.minReplicas) 0))) -}}
{{- $_ := set $pool "most" (int (default $pool.replicas $pool.maxReplicas)) -}}
{{ toYaml $pool }}
{{- end }}

{{/* Worker groups as a list under `groups`: each has name, pools and pod. Colocated pools share the last group. */}}
{{- define "tandem.groups" -}}
{{- $root := . -}}
{{- $groups := list -}}
{{- $shared := list -}}
{{- range $name := keys .Values.pools | sortAlpha -}}
{{- $pool := include "tandem.pool" (list $root $name) | fromYaml -}}
{{- if $pool.colocate -}}
{{- $shared = append $shared $pool -}}
{{- else -}}
{{- $groups = append $groups (dict "name" $name "isShared" false "pools" (list $pool) "pod" $pool) -}}
{{- end -}}
{{- end -}}
{{- if $shared -}}
{{- $pod := mergeOverwrite (deepCopy .Values.poolDefaults) .Values.colocated -}}
{{- $groups = append $groups (dict "name" "colocated" "isShared" true "pools" $shared "pod" $pod) -}}
{{- end -}}
{{ toYaml (dict "groups" $groups) }}
{{- end }}

{{/* Port of the pool at an index of its pod, or 0 if a pod has several workers of the pool: list of first port, pool and
     index. */}}
{{- define "tandem.workerPort" -}}
{{ ternary (add (first .) (last .)) 0 (eq (int (index . 1).replicasPerPod) 1) }}
{{- end }}

{{/* Number of pods for a number of workers: list of workers and pool. */}}
{{- define "tandem.pods" -}}
{{- $workers := first . -}}{{- $pool := last . -}}
{{ mul (div (add $workers $pool.replicasPerPod -1) $pool.replicasPerPod) $pool.podsPerWorker }}
{{- end }}

{{/* Compute threads of one worker on CPUs, from the pod's limit: list of group and pool. */}}
{{- define "tandem.threads" -}}
{{- $workers := 0 -}}
{{- range (first .).pools }}{{ $workers = add $workers .replicasPerPod }}{{ end -}}
{{- $limit := toString (first .).pod.resources.limits.cpu -}}
{{- $cores := ternary (divf (trimSuffix "m" $limit | float64) 1000) ($limit | float64) (hasSuffix "m" $limit) -}}
{{ max 1 (divf $cores $workers | floor | int) }}
{{- end }}

{{/* Settings of one pool's workers: list of context, group, pool and index. */}}
{{- define "tandem.poolSettings" -}}
{{- $root := first . -}}{{- $group := index . 1 -}}{{- $pool := index . 2 -}}
{{- $worker := dict
    "pool" $pool.role
    "port" (include "tandem.workerPort" (list $root.Values.worker.port $pool (last .)) | int)
    "metrics_port" (include "tandem.workerPort" (list $root.Values.worker.metrics_port $pool (last .)) | int) -}}
{{- if $pool.lanes }}{{ $_ := set $worker "lanes" $pool.lanes }}{{ end -}}
{{- $engine := dict "tensor_parallel" (int $pool.ranks) -}}
{{- if gt (int $pool.podsPerWorker) 1 }}{{ $_ := set $engine "nnodes" (int $pool.podsPerWorker) }}{{ end -}}
{{- if not (or $pool.gpus $root.Values.engine.num_threads) -}}
{{- $_ := set $engine "num_threads" (include "tandem.threads" (list $group $pool) | int) -}}
{{- end -}}
{{- $own := dict "worker" $worker "engine" (mergeOverwrite $engine (deepCopy $pool.engine)) "speculative" $pool.speculative -}}
{{ toYaml (mergeOverwrite (include "tandem.workerSettings" $root | fromYaml) $own) }}
{{- end }}

{{/* Not empty if the planner sets the number of a pool's workers: list of context and pool. */}}
{{- define "tandem.isPlanned" -}}
{{- $planner := (first .).Values.planner -}}
{{- if and $planner.enabled (eq $planner.mode "act") (ne (last .).role "mixed") }}yes{{ end -}}
{{- end }}

{{/* The pool of a role that the planner scales, or nothing without exactly one such pool: list of context and role. */}}
{{- define "tandem.plannedPool" -}}
{{- $root := first . -}}{{- $role := last . -}}
{{- $found := list -}}
{{- range $name := keys $root.Values.pools | sortAlpha -}}
{{- $pool := include "tandem.pool" (list $root $name) | fromYaml -}}
{{- if eq $pool.role $role }}{{ $found = append $found $pool }}{{ end -}}
{{- end -}}
{{- if eq (len $found) 1 }}{{ toYaml (first $found) }}{{ end -}}
{{- end }}

{{/* Not empty if the planner calls the Kubernetes API. */}}
{{- define "tandem.patchesClusters" -}}
{{- if and .Values.planner.enabled (eq .Values.planner.actuator "raycluster") }}yes{{ end -}}
{{- end }}

{{/* Not empty if pods use the host network, where policies cannot select them by labels. */}}
{{- define "tandem.usesHostNetwork" -}}
{{- range (include "tandem.groups" . | fromYaml).groups }}{{ if .pod.hostNetwork }}yes{{ end }}{{ end -}}
{{- end }}

{{/* A quantity of Kubernetes as a number. */}}
{{- define "tandem.amount" -}}
{{- $unit := regexFind "[A-Za-z]+$" (toString .) -}}
{{- $units := dict "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0
    "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{ mulf (trimSuffix $unit (toString .) | float64) (get $units $unit | default 1.0) }}
{{- end }}

{{/* Reject requests above limits in pods that KubeRay makes, because only its own log would tell: list of key and resources. */}}
{{- define "tandem.checkAmounts" -}}
{{- $key := first . -}}{{- $resources := last . -}}
{{- range $name, $request := $resources.requests -}}
{{- $limit := get $resources.limits $name -}}
{{- if and $limit (gt (include "tandem.amount" $request | float64) (include "tandem.amount" $limit | float64)) -}}
{{- fail (printf "%s.requests.%s is %v, more than limits.%s, which is %v: set it to at most the limit" $key $name $request $name $limit) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Reject equal ports of gateways, and of the workers in one pod: each further pool of a pod uses the next port after
     worker.port and after worker.metrics_port. */}}
{{- define "tandem.checkPorts" -}}
{{- $seen := dict -}}
{{- range $name := list "port" "grpc_port" "metrics_port" -}}
{{- $port := toString (int (get $.Values.gateway $name)) -}}
{{- with get $seen $port -}}
{{- fail (printf "gateway.%s is %s, and so is gateway.%s: set different ports" $name $port .) -}}
{{- end -}}
{{- $_ := set $seen $port $name -}}
{{- end -}}
{{- $apart := sub (int .Values.worker.port) (int .Values.worker.metrics_port) | int -}}
{{- range $group := (include "tandem.groups" . | fromYaml).groups -}}
{{- $needed := 0 -}}
{{- range $index, $pool := $group.pools -}}
{{- if eq (int $pool.replicasPerPod) 1 -}}
{{- $needed = add $index 1 | int -}}
{{- end -}}
{{- end -}}
{{- if and (lt $apart $needed) (gt $apart (sub 0 $needed | int)) -}}
{{- fail (printf "worker.port is %v and worker.metrics_port is %v: set them at least %v apart, because each further pool of a pod uses the next port after each of them" (int $.Values.worker.port) (int $.Values.worker.metrics_port) $needed) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Reject impossible values; each message begins with the key. */}}
{{- define "tandem.check" -}}
{{- $root := . -}}
{{- if not (regexMatch "^[a-z]" (include "tandem.fullname" .)) -}}
{{- fail (printf "fullnameOverride: the names of this release begin with %s, and a Service's and a RayService's must begin with a letter: set another" (include "tandem.fullname" .)) -}}
{{- end -}}
{{- $roles := list -}}
{{- $pods := dict -}}
{{- range $name := keys .Values.pools | sortAlpha -}}
{{- $pool := include "tandem.pool" (list $root $name) | fromYaml -}}
{{- $roles = append $roles $pool.role -}}
{{- if or (lt (int $pool.replicas) (int $pool.least)) (gt (int $pool.replicas) (int $pool.most)) -}}
{{- fail (printf "pools.%s.replicas is %v: set a number from minReplicas (%v) to maxReplicas (%v), or change these" $name $pool.replicas $pool.least $pool.most) -}}
{{- end -}}
{{- if and (eq (int $pool.least) 0) (not (include "tandem.isPlanned" (list $root $pool))) -}}
{{- fail (printf "pools.%s.minReplicas is 0: only the planner starts workers of an empty pool, and only prefill and decode workers, in mode act: set planner.enabled=true and planner.mode=act, or minReplicas to 1 or more" $name) -}}
{{- end -}}
{{- if and (eq (int $pool.least) 0) (not (get $root.Values.gateway "wake_timeout_s")) -}}
{{- fail (printf "pools.%s.minReplicas is 0, and gateway.wake_timeout_s is 0, so requests would not wait for a first worker: set it to more seconds than a worker takes to start, or minReplicas to 1 or more" $name) -}}
{{- end -}}
{{- if and (include "tandem.isIncremental" $root) (include "tandem.isPlanned" (list $root $pool)) (lt (int $pool.least) (int $pool.replicas)) -}}
{{- fail (printf "pools.%s.minReplicas is %v, less than replicas, which is %v: with ray.upgradeStrategy=NewClusterWithIncrementalUpgrade Serve keeps replicas as the minimum, so set both to one number, or set upgradeStrategy=NewCluster" $name $pool.least $pool.replicas) -}}
{{- end -}}
{{- if and $pool.gpus (ne (int $pool.gpus) (int $pool.ranks)) -}}
{{- fail (printf "pools.%s.tensorParallel is %v: a worker has one rank for each of its %v GPUs, so set it to gpus or to 0" $name $pool.ranks $pool.gpus) -}}
{{- end -}}
{{- if ne (include "tandem.device" $root) (ternary "cuda" "cpu" (gt (int $pool.gpus) 0)) -}}
{{- fail (printf "pools.%s.gpus is 0, and other pools have GPUs: workers on CPUs and on GPUs cannot exchange KV, so set gpus in all pools or in none" $name) -}}
{{- end -}}
{{- if gt (int $pool.podsPerWorker) 1 -}}
{{- if or $pool.colocate (gt (int $pool.replicasPerPod) 1) -}}
{{- fail (printf "pools.%s.podsPerWorker is %v: a worker of several pods shares none of them, so unset colocate and replicasPerPod, or podsPerWorker" $name $pool.podsPerWorker) -}}
{{- end -}}
{{- if mod $pool.ranks $pool.podsPerWorker -}}
{{- fail (printf "pools.%s.podsPerWorker is %v, and a worker has %v ranks: set gpus or tensorParallel to a multiple of it, because each pod has equally many" $name $pool.podsPerWorker $pool.ranks) -}}
{{- end -}}
{{- if mod $pool.surgePods $pool.podsPerWorker -}}
{{- fail (printf "pools.%s.surgePods is %v: a worker takes %v pods, so set a multiple of that" $name $pool.surgePods $pool.podsPerWorker) -}}
{{- end -}}
{{- if eq (get $root.Values.transfer "backend" | default "auto") "local" -}}
{{- fail (printf "transfer.backend is local, and pools.%s.podsPerWorker is %v: local reads only within a pod, so set another backend" $name $pool.podsPerWorker) -}}
{{- end -}}
{{- end -}}
{{- if $pool.colocate -}}
{{- range $key, $_ := omit (get $root.Values.pools $name) "role" "replicas" "minReplicas" "maxReplicas" "gpus" "tensorParallel" "replicasPerPod"
    "podsPerWorker" "colocate" "surgePods" "engine" "speculative" "lanes" -}}
{{- fail (printf "pools.%s.%s describes a pod, and colocated pools share theirs: set colocated.%s, or unset pools.%s.colocate" $name $key $key $name) -}}
{{- end -}}
{{- $_ := set $pods $name (include "tandem.pods" (list $pool.replicas $pool)) -}}
{{- else if and (has (get $root.Values.transfer "require" | default "any") (list "cuda_ipc" "shared_memory")) (ne $pool.role "mixed") -}}
{{- fail (printf "transfer.require is %s, which only links within one pod can meet: set pools.%s.colocate, or another transfer.require" $root.Values.transfer.require $name) -}}
{{- end -}}
{{- end -}}
{{- if gt (values $pods | uniq | len) 1 -}}
{{- fail (printf "pools.%s.replicas make %v pods, but colocated pools share their pods: set replicas so that replicas / replicasPerPod is equal in all of them" (keys $pods | sortAlpha | join ".replicas, pools.") (values $pods | sortAlpha | join ", ")) -}}
{{- end -}}
{{- range $group := (include "tandem.groups" $root | fromYaml).groups -}}
{{- include "tandem.checkAmounts" (list (ternary "colocated.resources" (printf "pools.%s.resources" $group.name) $group.isShared) $group.pod.resources) -}}
{{- end -}}
{{- include "tandem.checkAmounts" (list "ray.head.resources" .Values.ray.head.resources) -}}
{{- include "tandem.checkAmounts" (list "ray.inTreeAutoscaling.resources" .Values.ray.inTreeAutoscaling.resources) -}}
{{- include "tandem.checkAmounts" (list "cache.fetch.resources" .Values.cache.fetch.resources) -}}
{{- if not (or (has "mixed" $roles) (and (has "prefill" $roles) (has "decode" $roles))) -}}
{{- fail "pools: there must be prefill and decode workers, or mixed ones: add a pool with the role that is missing" -}}
{{- end -}}
{{- if and .Values.planner.enabled (eq .Values.planner.mode "act") -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := include "tandem.plannedPool" (list $root $role) | fromYaml -}}
{{- if not $pool -}}
{{- fail (printf "planner.mode is act, which needs one pool with the role %s, because the planner plans workers by role: keep one pool of each role, or set planner.mode=explain" $role) -}}
{{- end -}}
{{- if and $pool.colocate (eq $root.Values.planner.actuator "raycluster") -}}
{{- fail (printf "pools.%s.colocate: planner.actuator raycluster plans worker groups, and the shared group has several roles: unset colocate, or set planner.actuator=serve" $pool.name) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.planner.actuator "serve") (not .Values.ray.inTreeAutoscaling.enabled) -}}
{{- fail "planner.actuator is serve, and ray.inTreeAutoscaling.enabled is false: nothing would add pods, so enable Ray's autoscaler, or set planner.actuator=raycluster" -}}
{{- end -}}
{{- end -}}
{{- if and (include "tandem.patchesClusters" .) .Values.ray.inTreeAutoscaling.enabled -}}
{{- fail "planner.actuator is raycluster, and ray.inTreeAutoscaling.enabled is true: both would write the number of pods, so disable Ray's autoscaler, or set planner.actuator=serve" -}}
{{- end -}}
{{- if include "tandem.isIncremental" . -}}
{{- $options := .Values.ray.incrementalUpgrade -}}
{{- if not .Values.ray.inTreeAutoscaling.enabled -}}
{{- fail "ray.upgradeStrategy is NewClusterWithIncrementalUpgrade, and ray.inTreeAutoscaling.enabled is false: nothing would add pods to the second cluster, so enable Ray's autoscaler, or set upgradeStrategy=NewCluster" -}}
{{- end -}}
{{- if not $options.gatewayClassName -}}
{{- fail "ray.incrementalUpgrade.gatewayClassName is empty: KubeRay creates a Gateway for an incremental upgrade, so name a GatewayClass, or set ray.upgradeStrategy=NewCluster" -}}
{{- end -}}
{{- if gt (int $options.stepSizePercent) (int $options.maxSurgePercent) -}}
{{- fail (printf "ray.incrementalUpgrade.stepSizePercent is %v, more than maxSurgePercent, which is %v: KubeRay refuses that, so set it to at most maxSurgePercent" $options.stepSizePercent $options.maxSurgePercent) -}}
{{- end -}}
{{- end -}}
{{- include "tandem.checkPorts" . -}}
{{- with .Values.gateway.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "gateway.autoscaling.minReplicas is %v, more than maxReplicas, which is %v: set it to at most maxReplicas" .minReplicas .maxReplicas) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.gateway.tls.clientCaSecret (not .Values.gateway.tls.existingSecret) -}}
{{- fail "gateway.tls.existingSecret is empty, and clientCaSecret is set: only with TLS have clients certificates, so set the Secret with the gateways' certificate" -}}
{{- end -}}
{{- $account := .Values.serviceAccount -}}
{{- $named := compact (list $account.gateway $account.worker $account.planner) -}}
{{- if and $account.create (ne (len $named) (len (uniq $named))) -}}
{{- fail (printf "serviceAccount: create makes an account for each component, and %s names one account twice: set different names, or create=false for accounts that exist" (join ", " $named)) -}}
{{- end -}}
{{- if and (include "tandem.patchesClusters" .) (not $account.create) (not $account.planner) -}}
{{- fail "serviceAccount.planner is empty, and create is false: every pod with the account default could patch RayClusters, so name an account of the planner's own" -}}
{{- end -}}
{{- if and (gt (int .Values.planner.replicas) 1) (eq .Values.planner.actuator "serve") -}}
{{- fail (printf "planner.replicas is %v, and planner.actuator serve has no Lease that elects a leader: set replicas=1, or planner.actuator=raycluster" .Values.planner.replicas) -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (include "tandem.usesHostNetwork" .) (not .Values.networkPolicy.nodes) -}}
{{- fail "networkPolicy.nodes is empty, and a pool has hostNetwork, whose pods policies know only by the nodes' addresses: set the nodes' ipBlocks" -}}
{{- end -}}
{{- $external := .Values.redis.external -}}
{{- if eq .Values.redis.mode "external" -}}
{{- if not (or $external.addresses $external.urlKey) -}}
{{- fail "redis.external.addresses is empty: set host:port of your Redis, or urlKey" -}}
{{- end -}}
{{- if and (gt (len $external.addresses) 1) (not $external.isCluster) -}}
{{- fail "redis.external.addresses: only a Redis Cluster has several addresses: set isCluster=true, or one address" -}}
{{- end -}}
{{- if and $external.urlKey (not $external.existingSecret) -}}
{{- fail "redis.external.existingSecret is empty, and urlKey names a key of it: set the name of the Secret" -}}
{{- end -}}
{{- if and $external.urlKey .Values.networkPolicy.enabled (not (or $external.addresses $external.urlPort)) -}}
{{- fail "redis.external.urlPort is 0: set the port of the URL under urlKey, which network policies open" -}}
{{- end -}}
{{- if .Values.ray.gcsFaultTolerance.enabled -}}
{{- if $external.isCluster -}}
{{- fail "redis.external.isCluster: Ray keeps its state in a single Redis only: use one, or set ray.gcsFaultTolerance.enabled=false" -}}
{{- end -}}
{{- if $external.urlKey -}}
{{- fail "redis.external.urlKey: Ray takes no URL for ray.gcsFaultTolerance: set addresses, username, passwordKey and tls instead" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $tenants := .Values.tenants -}}
{{- if and $tenants.existingSecret $tenants.content -}}
{{- fail "tenants.content is given, and so is tenants.existingSecret: remove one of them" -}}
{{- end -}}
{{- if and (not (include "tandem.asksForKeys" .)) (or $tenants.existingSecret $tenants.content) -}}
{{- fail "gateway.auth is off, so nobody is asked for the keys of tenants.existingSecret or tenants.content: set gateway.auth=keys, or remove them" -}}
{{- end -}}
{{- end }}
