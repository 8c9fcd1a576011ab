{{/* Parts of the configuration of the Prometheus operator and the collector. */}}

{{/* The head of an object of the operator: list of context, kind, component, name suffix and values. */}}
{{- define "tandem.monitor" -}}
{{- $root := first . -}}
apiVersion: monitoring.coreos.com/v1
kind: {{ index . 1 }}
metadata:
  {{- include "tandem.metadata" (list $root (index . 2) (index . 3)) | nindent 2 }}
    {{- with (last .).labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* The label by which alerts and dashboards identify programs. */}}
{{- define "tandem.job" -}}
- {targetLabel: job, replacement: tandem-{{ . }}}
{{- end }}

{{/* Scrape endpoints of workers. Workers with free ports (several of a pool in a pod) are not included: gateways list
     them at /metrics/targets, for Prometheus' HTTP service discovery. `worker` distinguishes workers for dashboards and
     alerts; full worker ids, which end in Ray's random suffix, are not known here. `scraped` marks releases of which only
     some workers are scraped, so that alerts do not compare them with all workers. */}}
{{- define "tandem.podEndpoints" -}}
{{- $root := . -}}
{{- $hasFreePorts := false -}}
{{- range (include "tandem.groups" . | fromYaml).groups -}}
{{- range .pools }}{{ if gt (int .replicasPerPod) 1 }}{{ $hasFreePorts = true }}{{ end }}{{ end -}}
{{- end -}}
{{- range $group := (include "tandem.groups" . | fromYaml).groups }}
{{- range $index, $pool := $group.pools }}
{{- if eq (int $pool.replicasPerPod) 1 }}
- port: metrics-{{ $index }}
  path: /metrics
  interval: {{ $root.Values.monitoring.podMonitor.interval }}
  relabelings:
    - {sourceLabels: [__meta_kubernetes_pod_label_ray_io_group], regex: {{ $group.name | quote }}, action: keep}
    {{- include "tandem.job" "worker" | nindent 4 }}
    - {targetLabel: pool, replacement: {{ $pool.role }}}
    - {sourceLabels: [pod], targetLabel: worker, replacement: "${1}-{{ $pool.name }}"}
    {{- if $hasFreePorts }}
    - {targetLabel: scraped, replacement: partly}
    {{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Rule groups of a file with the evaluation interval of the values: list of context and file. */}}
{{- define "tandem.ruleGroups" -}}
{{- $root := first . -}}
{{- $groups := list -}}
{{- range ($root.Files.Get (last .) | fromYaml).groups -}}
{{- $groups = append $groups (merge (dict "interval" $root.Values.monitoring.prometheusRule.interval) .) -}}
{{- end -}}
{{ toYaml $groups }}
{{- end }}

{{/* The collector's configuration, for traces only: metrics are scraped. */}}
{{- define "tandem.collectorConfig" -}}
{{- $collector := .Values.otel.collector -}}
{{- $host := ternary "[::]" .Values.bindAddress (eq .Values.bindAddress "::") -}}
extensions:
  health_check: {endpoint: "{{ $host }}:13133"}
receivers:
  otlp:
    protocols:
      grpc: {endpoint: "{{ $host }}:4317"}
      http: {endpoint: "{{ $host }}:4318"}
processors:
  memory_limiter: {check_interval: 1s, limit_percentage: 75, spike_limit_percentage: 15}
  batch: {}
exporters:
  {{- if $collector.exportEndpoint }}
  otlp:
    endpoint: {{ $collector.exportEndpoint | quote }}
    tls: {insecure: {{ $collector.exportInsecure }}}
  {{- else }}
  debug: {verbosity: basic}
  {{- end }}
service:
  extensions: [health_check]
  pipelines:
    traces:
      receivers: [otlp]
      processors: [memory_limiter, batch]
      exporters: [{{ ternary "otlp" "debug" (ne $collector.exportEndpoint "") }}]
{{- end }}
