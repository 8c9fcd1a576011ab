{{/* Names, labels and images. */}}

{{/* The prefix of every name: at most 40 characters, because KubeRay allows 47 for a RayService and adds to it. */}}
{{- define "tandem.fullname" -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- default $name .Values.fullnameOverride | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* Selector labels of a component's pods: list of context and component. */}}
{{- define "tandem.selector" -}}
{{- $root := first . -}}
app.kubernetes.io/part-of: tandem
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ last . }}
{{- end }}

{{/* Labels of an object: list of context and component. In Ray pods KubeRay sets app.kubernetes.io/name itself. */}}
{{- define "tandem.labels" -}}
{{- $root := first . -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Name, namespace and labels: list of context, component and name suffix. */}}
{{- define "tandem.metadata" -}}
{{- $root := first . -}}
name: {{ append (list (include "tandem.fullname" $root)) (last .) | compact | join "-" | quote }}
namespace: {{ $root.Release.Namespace | quote }}
labels:
  {{- include "tandem.labels" (list $root (index . 1)) | nindent 2 }}
{{- end }}

{{/* Labels of a component's pods: list of context, component and additional labels. */}}
{{- define "tandem.podLabels" -}}
{{- include "tandem.selector" (list (first .) (index . 1)) }}
{{- with (first .).Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- with last . }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Reference of an image: list of its values and the default tag. */}}
{{- define "tandem.image" -}}
{{- $image := first . -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default (last .) $image.tag }}
{{- end -}}
{{- end }}

{{- define "tandem.gatewayImage" -}}
{{ include "tandem.image" (list .Values.image.gateway .Chart.AppVersion) }}
{{- end }}

{{- define "tandem.workerImage" -}}
{{- $flavour := ternary "-cuda" "" (eq (include "tandem.device" .) "cuda") -}}
{{ include "tandem.image" (list .Values.image.worker (printf "%s%s" .Chart.AppVersion $flavour)) }}
{{- end }}

{{/* Names of the Secrets, created by the chart or by the user. */}}
{{- define "tandem.clusterSecret" -}}
{{ default (printf "%s-cluster" (include "tandem.fullname" .)) .Values.cluster.existingSecret }}
{{- end }}

{{- define "tandem.tenantsSecret" -}}
{{ default (printf "%s-tenants" (include "tandem.fullname" .)) .Values.tenants.existingSecret }}
{{- end }}

{{- define "tandem.redisSecret" -}}
{{ default (printf "%s-redis" (include "tandem.fullname" .)) .Values.redis.builtin.existingSecret }}
{{- end }}

{{/* The name of the gateways' Service, as their certificate has it. */}}
{{- define "tandem.gatewayHost" -}}
{{ include "tandem.fullname" . }}-gateway.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "tandem.gatewayScheme" -}}
{{ ternary "https" "http" (ne .Values.gateway.tls.existingSecret "") }}
{{- end }}

{{- define "tandem.gatewayUrl" -}}
{{ include "tandem.gatewayScheme" . }}://{{ include "tandem.gatewayHost" . }}:{{ .Values.gateway.service.httpPort }}
{{- end }}

{{/* The value of a key of an existing Secret, or nothing: list of context, name and key. By this an upgrade keeps what
     was generated once; without a cluster (helm template) no Secret is found. */}}
{{- define "tandem.kept" -}}
{{- $there := lookup "v1" "Secret" (first .).Release.Namespace (index . 1) -}}
{{- if $there -}}{{ index $there.data (last .) | default "" | b64dec }}{{- end -}}
{{- end }}

{{/* The name of a service account: list of context and component. */}}
{{- define "tandem.serviceAccountName" -}}
{{- $root := first . -}}
{{- $own := ternary (printf "%s-%s" (include "tandem.fullname" $root) (last .)) "default" $root.Values.serviceAccount.create -}}
{{ default $own (get $root.Values.serviceAccount (last .)) }}
{{- end }}

{{/* Metadata of a service account: list of context and component. */}}
{{- define "tandem.accountMetadata" -}}
{{- $root := first . -}}
name: {{ include "tandem.serviceAccountName" . | quote }}
namespace: {{ $root.Release.Namespace | quote }}
labels:
  {{- include "tandem.labels" . | nindent 2 }}
{{- with $root.Values.serviceAccount.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
