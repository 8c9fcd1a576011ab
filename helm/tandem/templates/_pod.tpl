{{/* Parts of pods: user, environment and volumes. */}}

{{/* Security context of every pod of the chart. 10001 is the user of the images. */}}
{{- define "tandem.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Security context of every container. Capabilities added here are lost because programs do not run as root. */}}
{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Scheduling of pods: values with nodeSelector, tolerations, affinity, priorityClassName. */}}
{{- define "tandem.placement" -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with get $ $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "tandem.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Variables for the pod's location, Redis and OpenTelemetry. Names of pod and node come first: later ones use them. */}}
{{- define "tandem.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{ include "tandem.redisEnv" . }}
{{- $endpoint := include "tandem.otelEndpoint" . }}
{{- if $endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ $endpoint | quote }}}
- {name: OTEL_EXPORTER_OTLP_PROTOCOL, value: {{ .Values.otel.protocol | quote }}}
- {name: OTEL_TRACES_EXPORTER, value: otlp}
- {name: OTEL_METRICS_EXPORTER, value: none} # metrics are scraped
- {name: OTEL_TRACES_SAMPLER, value: {{ .Values.otel.sampler | quote }}}
{{- if contains "ratio" .Values.otel.sampler }}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ .Values.otel.samplerArg | quote }}}
{{- end }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name=$(POD_NAMESPACE),k8s.pod.name=$(POD_NAME),k8s.node.name=$(NODE_NAME)
{{- end }}
{{- end }}

{{/* The receiver of spans; empty: none. */}}
{{- define "tandem.otelEndpoint" -}}
{{- $port := ternary 4317 4318 (eq .Values.otel.protocol "grpc") -}}
{{- $own := printf "http://%s-collector:%d" (include "tandem.fullname" .) $port -}}
{{- if or .Values.otel.endpoint .Values.otel.collector.enabled }}{{ default $own .Values.otel.endpoint }}{{ end -}}
{{- end }}

{{/* Variables for Redis with its password, which is not in the settings file. */}}
{{- define "tandem.redisEnv" -}}
{{- $external := .Values.redis.external -}}
{{- if eq .Values.redis.mode "builtin" -}}
- name: TANDEM_REDIS__URL
  valueFrom: {secretKeyRef: {name: {{ include "tandem.redisSecret" . | quote }}, key: url}}
{{- else if $external.urlKey -}}
- name: TANDEM_REDIS__URL
  valueFrom: {secretKeyRef: {name: {{ $external.existingSecret | quote }}, key: {{ $external.urlKey | quote }}}}
{{- else -}}
{{- $who := $external.username -}}
{{- if $external.existingSecret -}}
{{- $who = printf "%s:$(STORE_PASSWORD)" $who }}
- name: STORE_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ $external.existingSecret | quote }}, key: {{ $external.passwordKey | quote }}}}
{{ end -}}
- name: TANDEM_REDIS__URL
  value: {{ printf "redis%s%s://%s%s%s%s"
    (ternary "s" "" $external.tls.enabled)
    (ternary "+cluster" "" $external.isCluster)
    (ternary (printf "%s@" $who) "" (ne $who ""))
    (join "," $external.addresses)
    (ternary "" (printf "/%d" (int $external.database)) $external.isCluster)
    (ternary "?ssl_ca_certs=/etc/tandem-redis/ca.crt" "" (and $external.tls.enabled (ne $external.tls.caSecret ""))) | quote }}
{{- end }}
{{- end }}

{{/* Environment variables from a map of values. */}}
{{- define "tandem.ownEnv" -}}
{{- range $name, $value := . }}
- {name: {{ $name | quote }}, value: {{ toString $value | quote }}}
{{- end }}
{{- end }}

{{/* Settings and secrets, mounted as directories so that changed files become visible: list of context and component.
     What only gateways use is mounted for gateways, and for the doctor, which reads every file that the settings name.
     Test pods also get the CA of the gateways' certificate. */}}
{{- define "tandem.volumes" -}}
{{- $root := first . -}}
- name: config
  configMap: {name: {{ include "tandem.fullname" $root | quote }}}
- name: secrets
  projected:
    defaultMode: 0440
    sources:
      - secret: {name: {{ include "tandem.clusterSecret" $root | quote }}, items: [{key: secret, path: secret}]}
      {{- with $root.Values.cluster.tls.existingSecret }}
      - secret:
          name: {{ . | quote }}
          items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}, {key: ca.crt, path: ca.crt}]
      {{- end }}
      {{- if has (last .) (list "gateway" "test") }}
      {{- if include "tandem.asksForKeys" $root }}
      - secret:
          name: {{ include "tandem.tenantsSecret" $root | quote }}
          items: [{key: {{ ternary $root.Values.tenants.key "tenants.yaml" (ne $root.Values.tenants.existingSecret "") | quote }}, path: tenants.yaml}]
      {{- end }}
      {{- with $root.Values.gateway.tls }}
      {{- if .existingSecret }}
      - secret:
          name: {{ .existingSecret | quote }}
          items:
            - {key: tls.crt, path: gateway-tls.crt}
            - {key: tls.key, path: gateway-tls.key}
            {{- if and .caKey (eq (last $) "test") }}
            - {key: {{ .caKey | quote }}, path: gateway-ca.crt}
            {{- end }}
      {{- end }}
      {{- if .clientCaSecret }}
      - secret: {name: {{ .clientCaSecret | quote }}, items: [{key: {{ .clientCaKey | quote }}, path: gateway-client-ca.crt}]}
      {{- end }}
      {{- end }}
      {{- end }}
- name: tmp
  emptyDir: {sizeLimit: {{ ternary "10Gi" "1Gi" (eq (last .) "ray") }}}
{{- with include "tandem.redisCa" $root }}
- name: redis-ca
  secret: {secretName: {{ . | quote }}, items: [{key: {{ $root.Values.redis.external.tls.caKey | quote }}, path: ca.crt}]}
{{- end }}
{{- end }}

{{- define "tandem.mounts" -}}
- {name: config, mountPath: /etc/tandem, readOnly: true}
- {name: secrets, mountPath: /etc/tandem-secrets, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if include "tandem.redisCa" . }}
- {name: redis-ca, mountPath: /etc/tandem-redis, readOnly: true}
{{- end }}
{{- end }}

{{/* The Secret with the CA certificates for Redis, if there is one. */}}
{{- define "tandem.redisCa" -}}
{{- $tls := .Values.redis.external.tls -}}
{{- if and (eq .Values.redis.mode "external") $tls.enabled }}{{ $tls.caSecret }}{{ end -}}
{{- end }}
