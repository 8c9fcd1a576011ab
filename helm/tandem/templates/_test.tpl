{{/* A pod that `helm test` runs and checks. */}}

{{/* The pod: list of context, name suffix, command and variables. */}}
{{- define "tandem.testPod" -}}
{{- $root := first . -}}
apiVersion: v1
kind: Pod
metadata:
  name: {{ include "tandem.fullname" $root }}-test-{{ index . 1 }}
  namespace: {{ $root.Release.Namespace | quote }}
  labels:
    {{- include "tandem.labels" (list $root "test") | nindent 4 }}
  annotations:
    helm.sh/hook: test
    helm.sh/hook-delete-policy: before-hook-creation
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  enableServiceLinks: false
  activeDeadlineSeconds: 720 # the doctor measures 16 links, which may take half a minute each
  securityContext:
    {{- include "tandem.podSecurity" $root | nindent 4 }}
  {{- include "tandem.pullSecrets" $root | nindent 2 }}
  containers:
    - name: test
      image: {{ include "tandem.gatewayImage" $root }}
      imagePullPolicy: {{ $root.Values.image.gateway.pullPolicy }}
      command: {{ index . 2 | toJson }}
      env:
        {{- include "tandem.env" $root | nindent 8 }}
        {{- with last . }}
        {{- . | nindent 8 }}
        {{- end }}
      resources:
        requests: {cpu: 100m, memory: 256Mi}
        limits: {cpu: "1", memory: 512Mi}
      securityContext:
        {{- include "tandem.containerSecurity" . | nindent 8 }}
      volumeMounts:
        {{- include "tandem.mounts" $root | nindent 8 }}
  volumes:
    {{- include "tandem.volumes" (list $root "test") | nindent 4 }}
{{- end }}

{{/* The file with the CA of the gateways' certificate; empty: public CAs, or no TLS. */}}
{{- define "tandem.testCa" -}}
{{- with .Values.gateway.tls }}{{ if and .existingSecret .caKey }}/etc/tandem-secrets/gateway-ca.crt{{ end }}{{ end -}}
{{- end }}

{{/* Variables for a test request. The key is known only if the chart generated it, and client certificates never. */}}
{{- define "tandem.testEnv" -}}
- {name: HTTP, value: {{ include "tandem.gatewayUrl" . | quote }}}
- {name: GRPC, value: "{{ include "tandem.gatewayHost" . }}:{{ .Values.gateway.service.grpcPort }}"}
{{- if .Values.gateway.tls.existingSecret }}
- {name: TLS, value: "{{ ternary "mutual" "server" (ne .Values.gateway.tls.clientCaSecret "") }}"}
- {name: CA_FILE, value: {{ include "tandem.testCa" . | quote }}}
{{- end }}
{{- if and (include "tandem.asksForKeys" .) (not .Values.tenants.existingSecret) (not .Values.tenants.content) }}
- name: TANDEM_API_KEY
  valueFrom: {secretKeyRef: {name: {{ include "tandem.tenantsSecret" . | quote }}, key: key}}
{{- end }}
{{- end }}
