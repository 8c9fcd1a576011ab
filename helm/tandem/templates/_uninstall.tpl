{{/* What runs before the release is uninstalled. */}}

{{/* Not empty: Ray's state is in the release's own Redis, so KubeRay must remove it before Helm deletes that Redis. */}}
{{- define "tandem.deletesRayFirst" -}}
{{- if and .Values.ray.gcsFaultTolerance.enabled (eq .Values.redis.mode "builtin") }}yes{{ end }}
{{- end }}

{{/* Metadata of one of the hook's objects: list of context and weight; those of less weight are made first. */}}
{{- define "tandem.uninstallMetadata" -}}
{{- include "tandem.metadata" (list (first .) "uninstall" "uninstall") }}
annotations:
  helm.sh/hook: pre-delete
  helm.sh/hook-weight: {{ last . | quote }}
  helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
