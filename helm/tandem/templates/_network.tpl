{{/* Parts of network policies; never a whole one. */}}

{{/* The head of a policy: list of context, component, what follows the name and further labels that its pods have. */}}
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

{{/* Pods of workers and the head, and the nodes where some are in the nodes' own network. */}}
{{- define "tandem.rayPeers" -}}
{{ include "tandem.peer" (list . "ray") }}
{{- if include "tandem.usesHostNetwork" . }}
{{ toYaml .Values.networkPolicy.nodes }}
{{- end }}
{{- end }}

{{- define "tandem.toDns" -}}
- to:
    {{- toYaml .Values.networkPolicy.dns | nindent 4 }}
  ports: [{protocol: UDP, port: 53}, {protocol: TCP, port: 53}]
{{- end }}

{{- define "tandem.toRedis" -}}
{{- if eq .Values.redis.mode "builtin" -}}
- to:
    {{- include "tandem.peer" (list . "redis") | nindent 4 }}
  ports: [{protocol: TCP, port: 6379}]
{{- else -}}
- to:
    {{- toYaml .Values.networkPolicy.redisTo | nindent 4 }}
  {{- with .Values.redis.external.addresses }}
  ports:
    {{- range . }}
    - {protocol: TCP, port: {{ splitList ":" . | last }}}
    {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Where spans go, if they go anywhere. */}}
{{- define "tandem.toCollector" -}}
{{- if .Values.otel.endpoint }}
- to:
    {{- toYaml .Values.networkPolicy.otelTo | nindent 4 }}
{{- else if .Values.otel.collector.enabled }}
- to:
    {{- include "tandem.peer" (list . "collector") | nindent 4 }}
  ports: [{protocol: TCP, port: 4317}, {protocol: TCP, port: 4318}]
{{- end }}
{{- end }}

{{- define "tandem.toApiServer" -}}
- to:
    {{- toYaml .Values.networkPolicy.apiServerTo | nindent 4 }}
  ports: [{protocol: TCP, port: 443}, {protocol: TCP, port: 6443}]
{{- end }}

{{/* Ports of workers: list of context and the first one. Where a pod has several workers of a pool these take free ones,
     which are those that Linux draws from. */}}
{{- define "tandem.workerPorts" -}}
{{- $root := first . -}}{{- $first := last . -}}
{{- $ports := list -}}
{{- range $group := (include "tandem.groups" $root | fromYaml).groups -}}
{{- range $index, $pool := $group.pools -}}
{{- $port := include "tandem.workerPort" (list $first $pool $index) | int -}}
{{- $ports = append $ports (ternary (dict "protocol" "TCP" "port" $port) (dict "protocol" "TCP" "port" 32768 "endPort" 60999) (gt $port 0)) -}}
{{- end -}}
{{- end -}}
{{ toYaml (uniq $ports) }}
{{- end }}
