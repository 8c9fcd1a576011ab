{{/* The tree of settings that programs read, without secrets and without the chart's own keys. */}}

{{/* The device of all workers: cuda if pools have GPUs, else cpu. */}}
{{- define "tandem.device" -}}
{{- $device := "cpu" -}}
{{- range $name, $_ := .Values.pools -}}
{{- if (include "tandem.pool" (list $ $name) | fromYaml).gpus }}{{ $device = "cuda" }}{{ end -}}
{{- end -}}
{{ $device }}
{{- end }}

{{/* Sections that workers read: a change restarts the workers. */}}
{{- define "tandem.workerSettings" -}}
{{- $secrets := "/etc/tandem-secrets" -}}
{{- $cluster := dict "secret_file" (printf "%s/secret" $secrets) -}}
{{- if .Values.cluster.tls.existingSecret -}}
{{- range $setting, $file := dict "tls_cert_file" "tls.crt" "tls_key_file" "tls.key" "tls_ca_file" "ca.crt" -}}
{{- $_ := set $cluster $setting (printf "%s/%s" $secrets $file) -}}
{{- end -}}
{{- end -}}
{{- $sections := dict
    "model" (merge (dict "device" (include "tandem.device" .)) .Values.model)
    "engine" .Values.engine
    "speculative" .Values.speculative
    "slo" .Values.slo
    "lanes" .Values.lanes
    "handoff" .Values.handoff
    "transfer" .Values.transfer
    "worker" (merge (dict "host" .Values.bindAddress) .Values.worker)
    "redis" (omit .Values.redis "mode" "builtin" "external")
    "cluster" $cluster
    "telemetry" .Values.telemetry -}}
{{ toYaml $sections }}
{{- end }}

{{- define "tandem.gatewaySettings" -}}
{{- $settings := omit .Values.gateway "tls" "replicas" "progressDeadlineSeconds" "preStopSeconds" "autoscaling" "pdb" "topologySpread" "resources"
    "service" "ingress" "httpRoute" "grpcRoute" "env" "podAnnotations" "podLabels" "nodeSelector" "tolerations" "affinity"
    "priorityClassName" -}}
{{- $_ := set $settings "host" .Values.bindAddress -}}
{{- with $settings.allowed_hosts -}}{{/* helm test and Prometheus' service discovery use the Services' names */}}
{{- $metrics := printf "%s-gateway-metrics.%s.svc" (include "tandem.fullname" $) $.Release.Namespace -}}
{{- if ne . "*" }}{{ $_ := set $settings "allowed_hosts" (printf "%s,%s,%s" . (include "tandem.gatewayHost" $) $metrics) }}{{ end -}}
{{- end -}}
{{- if include "tandem.asksForKeys" . -}}
{{- $_ := set $settings "tenants" "/etc/tandem-secrets/tenants.yaml" -}}
{{- end -}}
{{- with .Values.gateway.tls -}}
{{- if .existingSecret -}}
{{- $_ := set $settings "tls_cert_file" "/etc/tandem-secrets/gateway-tls.crt" -}}
{{- $_ := set $settings "tls_key_file" "/etc/tandem-secrets/gateway-tls.key" -}}
{{- end -}}
{{- if .clientCaSecret }}{{ $_ := set $settings "tls_client_ca_file" "/etc/tandem-secrets/gateway-client-ca.crt" }}{{ end -}}
{{- end -}}
{{ toYaml $settings }}
{{- end }}

{{- define "tandem.plannerSettings" -}}
{{- $settings := omit .Values.planner "enabled" "replicas" "resources" "env" "podAnnotations" "podLabels" "nodeSelector"
    "tolerations" "affinity" "priorityClassName" -}}
{{- $groups := list -}}
{{- range $role := list "prefill" "decode" -}}
{{- with include "tandem.plannedPool" (list $ $role) | fromYaml -}}
{{- $_ := set $settings (printf "min_%s" $role) (int .least) -}}
{{- $_ := set $settings (printf "max_%s" $role) (int .most) -}}
{{- if not .colocate -}}
{{- $size := ternary (printf "/%v" .podsPerWorker) (printf ":%v" .replicasPerPod) (gt (int .podsPerWorker) 1) -}}
{{- $groups = append $groups (printf "%s=%s%s+%v" $role .name $size .surgePods) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $own := dict "host" .Values.bindAddress "rayservice" (include "tandem.fullname" .) "groups" (join "," $groups)
    "lease" (printf "%s-planner" (include "tandem.fullname" .)) -}}
{{ toYaml (merge $own $settings) }}
{{- end }}

{{/* The complete settings file. */}}
{{- define "tandem.config" -}}
{{- $sections := include "tandem.workerSettings" . | fromYaml -}}
{{- $_ := set $sections "gateway" (include "tandem.gatewaySettings" . | fromYaml) -}}
{{- $_ := set $sections "planner" (include "tandem.plannerSettings" . | fromYaml) -}}
{{ toYaml $sections }}
{{- end }}

{{/* Not empty if gateways require keys; YAML reads a bare `off` as false. */}}
{{- define "tandem.asksForKeys" -}}
{{- if eq (toString .Values.gateway.auth) "keys" }}yes{{ end -}}
{{- end }}

{{/* The seconds of a setting as a whole number. */}}
{{- define "tandem.seconds" -}}
{{ . | float64 | ceil | int }}
{{- end }}
