{{/* Render an Ingress for the gateways' Service: list of context, name suffix, values and port of the Service. */}}
{{- define "tandem.ingress" -}}
{{- $root := first . -}}{{- $ingress := index . 2 -}}{{- $port := last . -}}
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  {{- include "tandem.metadata" (list $root "gateway" (index . 1)) | nindent 2 }}
  {{- with $ingress.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with $root.Values.gateway.ingress.className }}
  ingressClassName: {{ . | quote }}
  {{- end }}
  {{- with $ingress.tls }}
  tls:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  rules:
    {{- range default (list "") $ingress.hosts }}
    - http:
        paths:
          - path: /
            pathType: Prefix
            backend: {service: {name: {{ include "tandem.fullname" $root }}-gateway, port: {name: {{ $port }}}}}
      {{- with . }}
      host: {{ . | quote }}
      {{- end }}
    {{- end }}
{{- end }}

{{/* Render a route of the Gateway API without its rules: list of context, kind, name suffix and values. */}}
{{- define "tandem.route" -}}
{{- $route := last . -}}
apiVersion: gateway.networking.k8s.io/v1
kind: {{ index . 1 }}
metadata:
  {{- include "tandem.metadata" (list (first .) "gateway" (index . 2)) | nindent 2 }}
  {{- with $route.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  parentRefs:
    {{- toYaml $route.parentRefs | nindent 4 }}
  {{- with $route.hostnames }}
  hostnames:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
