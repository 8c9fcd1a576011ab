{{/* Parts of network policies. */}}

{{/* The head of a policy: list of context, component, name suffix and additional labels of its pods. */}}
{{- define "tandem.policy" -}}
{{- $root := first . -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "tandem.metadata" (list $root (index . 1) (index . 2)) | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "tandem.selector" (list $root (index . 1)) | nindent 6 }}
      {{- with last . }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
{{- end }}

{{/* Pods of a component as peers: list of context and component. */}}
{{- define "tandem.peer" -}}
- podSelector:
    matchLabels:
      {{- include "tandem.selector" . | nindent 6 }}
{{- end }}

{{/* Pods of workers and the head, and the nodes if some pods use the host network. */}}
{{- define "tandem.rayPeers" -}}
{{ include "tandem.peer" (list . "ray") }}
{{- if include "tandem.usesHostNetwork" . }}
{{ toYaml .Values.networkPolicy.nodes }}
{{- end }}
{{- end }}

{{/* An egress rule, or nothing without peers, because an empty list would allow everybody: list of peers and ports. */}}
{{- define "tandem.egressTo" -}}
{{- $ports := last . -}}
{{- with first . }}
- to:
    {{- toYaml . | nindent 4 }}
  ports:
    {{- range uniq $ports }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end }}
{{- end }}

{{- define "tandem.toDns" -}}
{{- with .Values.networkPolicy.dns }}
- to:
    {{- toYaml . | nindent 4 }}
  ports: [{protocol: UDP, port: 53}, {protocol: TCP, port: 53}]
{{- end }}
{{- end }}

{{- define "tandem.toRedis" -}}
{{- $external := .Values.redis.external -}}
{{- if eq .Values.redis.mode "builtin" -}}
- to:
    {{- include "tandem.peer" (list . "redis") | nindent 4 }}
  ports: [{protocol: TCP, port: 6379}]
{{- else -}}
{{- $ports := list -}}
{{- if $external.urlKey }}{{ $ports = without (list (int $external.urlPort)) 0 }}{{ end -}}
{{- range $external.addresses }}{{ $ports = append $ports (splitList ":" . | last | int) }}{{ end -}}
{{ include "tandem.egressTo" (list .Values.networkPolicy.redisTo $ports) }}
{{- end }}
{{- end }}

{{/* Port of a host:port or URL: list of the address and the default port. */}}
{{- define "tandem.portOf" -}}
{{- $host := first . | trimPrefix "https://" | trimPrefix "http://" | splitList "/" | first -}}
{{ ternary (splitList ":" $host | last) (last . | toString) (regexMatch ":[0-9]+$" $host) }}
{{- end }}

{{/* Egress to the receiver of spans, if there is one. The default port is 443 for gRPC, and that of the scheme for HTTP. */}}
{{- define "tandem.toCollector" -}}
{{- $endpoint := .Values.otel.endpoint -}}
{{- if $endpoint -}}
{{- $isPlain := and (hasPrefix "http://" $endpoint) (ne .Values.otel.protocol "grpc") -}}
{{- $port := include "tandem.portOf" (list $endpoint (ternary 80 443 $isPlain)) -}}
{{ include "tandem.egressTo" (list .Values.networkPolicy.otelTo (list $port)) }}
{{- else if .Values.otel.collector.enabled }}
- to:
    {{- include "tandem.peer" (list . "collector") | nindent 4 }}
  ports: [{protocol: TCP, port: 4317}, {protocol: TCP, port: 4318}]
{{- end }}
{{- end }}

{{- define "tandem.toApiServer" -}}
{{ include "tandem.egressTo" (list .Values.networkPolicy.apiServerTo (list 443 6443)) }}
{{- end }}

{{/* Ports of workers with fixed ports: list of context and the first port. */}}
{{- define "tandem.fixedPorts" -}}
{{- $root := first . -}}{{- $first := last . -}}
{{- $ports := list -}}
{{- range $group := (include "tandem.groups" $root | fromYaml).groups -}}
{{- range $index, $pool := $group.pools -}}
{{- $port := include "tandem.workerPort" (list $first $pool $index) | int -}}
{{- if $port }}{{ $ports = append $ports (dict "protocol" "TCP" "port" $port) }}{{ end -}}
{{- end -}}
{{- end -}}
{{ toYaml (uniq $ports) }}
{{- end }}

{{/* Ports of all workers: list of context and the first port. Where a pod has several workers of a pool, these use free
     ports, so Linux' ephemeral range is opened. NIXL uses that range too, so use this only for callers of such workers. */}}
{{- define "tandem.workerPorts" -}}
{{- $ports := include "tandem.fixedPorts" . | fromYamlArray -}}
{{- range $group := (include "tandem.groups" (first .) | fromYaml).groups -}}
{{- range $group.pools -}}
{{- if gt (int .replicasPerPod) 1 -}}
{{- $ports = append $ports (dict "protocol" "TCP" "port" 32768 "endPort" 60999) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ toYaml (uniq $ports) }}
{{- end }}
