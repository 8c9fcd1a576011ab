{{/* Parts of the RayService. */}}

{{/* The configuration of Ray Serve: an application for each pool. */}}
{{- define "tandem.serveConfig" -}}
{{- $root := . -}}
{{- $applications := list -}}
{{- range $group := (include "tandem.groups" . | fromYaml).groups -}}
{{- range $index, $pool := $group.pools -}}
{{- $name := printf "tandem-%s" $pool.name -}}
{{- $args := dict
    "pool" $pool.name
    "settings" (include "tandem.poolSettings" (list $root $group $pool $index) | fromYaml)
    "num_gpus" (ternary 1 0 (gt (int $pool.gpus) 0))
    "resources" (dict $name 1) -}}
{{- $application := dict
    "name" $name
    "route_prefix" (printf "/%s" $name)
    "import_path" "tandem.worker.serve.application:build"
    "args" $args
    "deployments" (list (include "tandem.deployment" (list $root $pool) | fromYaml)) -}}
{{- $applications = append $applications $application -}}
{{- end -}}
{{- end -}}
{{ toYaml (dict
    "proxy_location" "EveryNode"
    "http_options" (dict "host" .Values.bindAddress "port" 8000)
    "applications" $applications) }}
{{- end }}

{{/* Number of replicas: list of context and pool. The application builder sets everything else. */}}
{{- define "tandem.deployment" -}}
{{- $root := first . -}}{{- $pool := last . -}}
name: tandem-{{ $pool.name }}
{{- if include "tandem.isPlanned" . }}
autoscaling_config:
  min_replicas: {{ $pool.least }}
  initial_replicas: {{ $pool.replicas }}
  max_replicas: {{ $pool.most }}
  upscale_delay_s: 0
  downscale_delay_s: 0
  policy:
    policy_function: "tandem.planner.serve_policy:replicas"
    policy_kwargs: {config: /etc/tandem/config.yaml, role: {{ $pool.role }}}
{{- else }}
num_replicas: {{ $pool.replicas }}
{{- end }}
{{- if not (or $root.Values.ray.inTreeAutoscaling.enabled $pool.surgePods) }}
max_surge_percent: 0 # a new worker would wait forever for a pod
{{- end }}
{{- end }}

{{/* Not empty if KubeRay replaces workers a few at a time. */}}
{{- define "tandem.isIncremental" -}}
{{- if eq .Values.ray.upgradeStrategy "NewClusterWithIncrementalUpgrade" }}yes{{ end -}}
{{- end }}

{{/* Pods of a group as KubeRay's replicas, minReplicas and maxReplicas: list of context and group. The minimum is lower
     than replicas with a planner, and 0 with an incremental upgrade, whose second cluster begins with it. The maximum
     leaves room to grow wherever Ray may add pods, because KubeRay does not change the bounds of a running cluster. */}}
{{- define "tandem.groupSize" -}}
{{- $root := first . -}}
{{- $least := 0 -}}{{- $most := 0 -}}{{- $now := 0 -}}{{- $spare := 0 -}}{{- $step := 1 -}}
{{- range (last .).pools -}}
{{- $isPlanned := include "tandem.isPlanned" (list $root .) -}}
{{- $least = max $least (include "tandem.pods" (list (ternary .least .replicas (ne $isPlanned "")) .)) -}}
{{- $mayGrow := or (ne $isPlanned "") $root.Values.ray.inTreeAutoscaling.enabled -}}
{{- $most = max $most (include "tandem.pods" (list (ternary .most .replicas $mayGrow) .)) -}}
{{- $now = max $now (include "tandem.pods" (list .replicas .)) -}}
{{- $step = max $step .podsPerWorker -}}
{{- $spare = max $spare .surgePods -}}
{{- end -}}
{{- if $root.Values.ray.inTreeAutoscaling.enabled }}
replicas: {{ $now }}
minReplicas: {{ ternary 0 $least (ne (include "tandem.isIncremental" $root) "") }}
maxReplicas: {{ add $most (max $step $spare) }} # room for a new worker before the old one ends
{{- else }}
replicas: {{ add $now $spare }}
minReplicas: {{ add $least $spare }}
maxReplicas: {{ add $most $spare }}
{{- end }}
{{- end }}

{{/* Ray's resources of a group's pod: a slot per worker with ranks in it, and one CPU per rank. */}}
{{- define "tandem.rayStartParams" -}}
{{- $root := first . -}}
{{- $slots := dict -}}{{- $ranks := 0 -}}{{- $gpus := 0 -}}
{{- range (last .).pools -}}
{{- $_ := set $slots (printf "tandem-%s" .name) (int .replicasPerPod) -}}
{{- $ranks = add $ranks .podRanks -}}
{{- $gpus = add $gpus .podGpus -}}
{{- end -}}
num-cpus: {{ $ranks | quote }}
num-gpus: {{ $gpus | quote }}
object-store-memory: {{ $root.Values.ray.objectStoreMemory | int64 | quote }}
resources: {{ printf "'%s'" (toJson $slots) | quote }}
{{- end }}

{{/* Environment variables of a group's pod: list of context and group. */}}
{{- define "tandem.rayEnv" -}}
{{- $root := first . -}}{{- $group := last . -}}{{- $pod := $group.pod -}}
{{ include "tandem.env" $root }}
- name: TANDEM_WORKER__HOST_LABEL
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- if $pod.zone }}
- {name: TANDEM_WORKER__ZONE, value: {{ $pod.zone | quote }}}
{{- else }}
- name: TANDEM_WORKER__ZONE
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['topology.kubernetes.io/zone']"}}
{{- end }}
{{- with $pod.rack }}
- {name: TANDEM_WORKER__RACK, value: {{ . | quote }}}
{{- end }}
{{- include "tandem.hubToken" $root }}
{{- $ucx := $pod.ucx -}}
{{- if and (eq (include "tandem.device" $root) "cpu") (not $group.isShared) -}}
{{- $ucx = merge (dict) $ucx (dict "UCX_TLS" "tcp") -}}
{{- end }}
{{- include "tandem.ownEnv" (merge (dict) $pod.env $ucx) }}
{{- end }}

{{- define "tandem.hubToken" -}}
{{- with .Values.cache.hubToken }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .existingSecret | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- end }}
{{- end }}

{{/* Resources of a group's container, including GPUs and RDMA devices. */}}
{{- define "tandem.rayResources" -}}
{{- $pod := deepCopy .pod.resources -}}
{{- $devices := dict -}}{{- $gpus := 0 -}}
{{- range .pools }}{{ $gpus = add $gpus .podGpus }}{{ end -}}
{{- if $gpus }}{{ $_ := set $devices .pod.gpuResource $gpus }}{{ end -}}
{{- if .pod.rdma.resource }}{{ $_ := set $devices .pod.rdma.resource (int .pod.rdma.count) }}{{ end -}}
{{ toYaml (dict
    "limits" (merge (dict) $devices $pod.limits)
    "requests" (merge (dict) $devices (default $pod.limits $pod.requests))) }}
{{- end }}

{{/* Volumes of every Ray pod: list of context and size of /dev/shm. */}}
{{- define "tandem.rayVolumes" -}}
{{- $root := first . -}}
{{ include "tandem.volumes" (list $root "ray") }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ last . }}}
{{- end }}

{{/* The model cache, which only workers mount: a claim bound to one node would bind the head to that node too. */}}
{{- define "tandem.cacheVolume" -}}
- name: cache
{{- if eq .Values.cache.type "pvc" }}
  persistentVolumeClaim: {claimName: {{ default (printf "%s-cache" (include "tandem.fullname" .)) .Values.cache.existingClaim | quote }}}
{{- else }}
  emptyDir: {sizeLimit: {{ .Values.cache.size }}}
{{- end }}
{{- end }}

{{- define "tandem.rayMounts" -}}
{{ include "tandem.mounts" . }}
- {name: shm, mountPath: /dev/shm}
{{- end }}

{{/* The worker group of pools: list of context and group. KubeRay sets the container's command and probes. */}}
{{- define "tandem.workerGroup" -}}
{{- $root := first . -}}{{- $group := last . -}}{{- $pod := $group.pod -}}
groupName: {{ $group.name | quote }}
{{- include "tandem.groupSize" . }}
rayStartParams:
  {{- include "tandem.rayStartParams" . | nindent 2 }}
template:
  metadata:
    labels:
      {{- include "tandem.podLabels" (list $root "ray" $pod.podLabels) | nindent 6 }}
    {{- with $pod.podAnnotations }}
    annotations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
  spec:
    serviceAccountName: {{ include "tandem.serviceAccountName" (list $root "worker") | quote }}
    automountServiceAccountToken: false
    enableServiceLinks: false
    # Longer than the pod's sequences may take to migrate or finish.
    terminationGracePeriodSeconds: {{ add (include "tandem.seconds" $root.Values.worker.drain_s) 40 }}
    {{- if $pod.hostNetwork }}
    hostNetwork: true
    dnsPolicy: ClusterFirstWithHostNet
    {{- end }}
    {{- with $pod.runtimeClassName }}
    runtimeClassName: {{ . | quote }}
    {{- end }}
    securityContext:
      {{- include "tandem.podSecurity" $root | nindent 6 }}
    {{- include "tandem.pullSecrets" $root | nindent 4 }}
    {{- include "tandem.placement" $pod | nindent 4 }}
    {{- if $root.Values.cache.fetch.enabled }}
    initContainers:
      {{- include "tandem.fetch" . | nindent 6 }}
    {{- end }}
    containers:
      - name: ray-worker
        image: {{ include "tandem.workerImage" $root }}
        imagePullPolicy: {{ $root.Values.image.worker.pullPolicy }}
        env:
          {{- include "tandem.rayEnv" . | nindent 10 }}
        ports:
          - {name: serve, containerPort: 8000}
          {{- range $index, $pool := $group.pools }}
          {{- if eq (int $pool.replicasPerPod) 1 }}
          - {name: {{ printf "grpc-%d" $index }}, containerPort: {{ include "tandem.workerPort" (list $root.Values.worker.port $pool $index) }}}
          - {name: {{ printf "metrics-%d" $index }}, containerPort: {{ include "tandem.workerPort" (list $root.Values.worker.metrics_port $pool $index) }}}
          {{- end }}
          {{- end }}
        lifecycle:
          preStop:
            exec: {command: [bash, -c, tandem drain --local --config /etc/tandem/config.yaml]}
        resources:
          {{- include "tandem.rayResources" $group | nindent 10 }}
        securityContext:
          {{- include "tandem.containerSecurity" . | nindent 10 }}
        volumeMounts:
          {{- include "tandem.rayMounts" $root | nindent 10 }}
          - {name: cache, mountPath: /cache}
    volumes:
      {{- include "tandem.rayVolumes" (list $root $pod.sharedMemory) | nindent 6 }}
      {{- include "tandem.cacheVolume" $root | nindent 6 }}
{{- end }}

{{/* Init container that downloads and converts the model: list of context and group, whose variables may configure
     access to the hub. */}}
{{- define "tandem.fetch" -}}
{{- $root := first . -}}{{- $group := last . -}}
- name: fetch-model
  image: {{ include "tandem.workerImage" $root }}
  imagePullPolicy: {{ $root.Values.image.worker.pullPolicy }}
  command:
    - python
    - -c
    - |
      import os
      from tandem.runtime.model_store import cache_root, resolve_model
      print("the model is at", resolve_model(os.environ["MODEL"], cache_root("")))
  env:
    - {name: MODEL, value: {{ $root.Values.model.id | quote }}}
    {{- include "tandem.hubToken" $root | nindent 4 }}
    {{- include "tandem.ownEnv" $group.pod.env | nindent 4 }}
  resources:
    {{- toYaml $root.Values.cache.fetch.resources | nindent 4 }}
  securityContext:
    {{- include "tandem.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: cache, mountPath: /cache}
{{- end }}

{{/* The head group: Ray's own processes, Serve's controller and the planner's policy, without workers. */}}
{{- define "tandem.headGroup" -}}
{{- $head := .Values.ray.head -}}
rayStartParams:
  num-cpus: "0"
  num-gpus: "0"
  dashboard-host: {{ .Values.bindAddress | quote }}
  object-store-memory: {{ .Values.ray.objectStoreMemory | int64 | quote }}
template:
  metadata:
    labels:
      {{- include "tandem.podLabels" (list . "ray" $head.podLabels) | nindent 6 }}
    {{- with $head.podAnnotations }}
    annotations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
  spec:
    {{- if not .Values.ray.inTreeAutoscaling.enabled }}
    serviceAccountName: {{ include "tandem.serviceAccountName" (list . "worker") | quote }}
    {{- end }}
    # KubeRay creates an account for Ray's autoscaler, which is a container of this pod.
    automountServiceAccountToken: {{ .Values.ray.inTreeAutoscaling.enabled }}
    enableServiceLinks: false
    terminationGracePeriodSeconds: 60
    securityContext:
      {{- include "tandem.podSecurity" . | nindent 6 }}
    {{- include "tandem.pullSecrets" . | nindent 4 }}
    {{- include "tandem.placement" $head | nindent 4 }}
    containers:
      - name: ray-head
        image: {{ include "tandem.workerImage" . }}
        imagePullPolicy: {{ .Values.image.worker.pullPolicy }}
        env:
          {{- include "tandem.env" . | nindent 10 }}
          {{- if and .Values.ray.gcsFaultTolerance.enabled (include "tandem.redisCa" .) }}
          - {name: RAY_REDIS_CA_CERT, value: /etc/tandem-redis/ca.crt}
          {{- end }}
          {{- include "tandem.ownEnv" $head.env | nindent 10 }}
        ports:
          - {name: gcs-server, containerPort: 6379}
          - {name: dashboard, containerPort: 8265}
          - {name: client, containerPort: 10001}
          - {name: serve, containerPort: 8000}
          - {name: metrics, containerPort: 8080}
        resources:
          {{- toYaml $head.resources | nindent 10 }}
        securityContext:
          {{- include "tandem.containerSecurity" . | nindent 10 }}
        volumeMounts:
          {{- include "tandem.rayMounts" . | nindent 10 }}
    volumes:
      {{- include "tandem.rayVolumes" (list . "512Mi") | nindent 6 }}
{{- end }}

{{/* The Redis in which Ray keeps its own state. */}}
{{- define "tandem.rayState" -}}
{{- $external := .Values.redis.external -}}
{{- if eq .Values.redis.mode "builtin" -}}
redisAddress: {{ include "tandem.fullname" . }}-redis:6379
redisPassword:
  valueFrom: {secretKeyRef: {name: {{ include "tandem.redisSecret" . | quote }}, key: password}}
{{- else -}}
redisAddress: {{ printf "%s://%s" (ternary "rediss" "redis" $external.tls.enabled) (first $external.addresses) | quote }}
{{- with $external.username }}
redisUsername: {value: {{ . | quote }}}
{{- end }}
{{- if $external.existingSecret }}
redisPassword:
  valueFrom: {secretKeyRef: {name: {{ $external.existingSecret | quote }}, key: {{ $external.passwordKey | quote }}}}
{{- end }}
{{- end }}
{{- end }}
