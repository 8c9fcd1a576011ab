{{/* An Ingress to the gateways' Service: list of context, what follows its name, its values and the Service's port. */}}
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
  ingressClassName: {{ . }}
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

{{/* A route of the Gateway API, but for its rules: list of context, kind, what follows its name and its values. */}}
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
