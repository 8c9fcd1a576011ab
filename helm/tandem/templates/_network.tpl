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

{{/* A rule of egress; none where nobody is named, since an empty list would mean everybody: list of peers and
     ports. */}}
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

{{/* Port of host:port or of a URL, with the one that is meant without any: list of both. */}}
{{- define "tandem.portOf" -}}
{{- $host := first . | trimPrefix "https://" | trimPrefix "http://" | splitList "/" | first -}}
{{ ternary (splitList ":" $host | last) (last . | toString) (regexMatch ":[0-9]+$" $host) }}
{{- end }}

{{/* Where spans go, if they go anywhere. gRPC takes 443 where an address has no port, HTTP what the scheme says. */}}
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

{{/* Ports of workers that have ports of their own: list of context and the first one. */}}
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

{{/* Ports of all workers: list of context and the first one. Where a pod has several workers of a pool these take free
     ones, which are those that Linux draws from; so does NIXL, which is for who must ask such workers only. */}}
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
