{{/* The name of the objects. It leaves room for suffixes within the 63 characters of a Service's name. */}}
{{- define "meshgate.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels of the pod: no version, so that another one replaces the pod only if it changes something else. */}}
{{- define "meshgate.podLabels" -}}
app: {{ include "meshgate.fullname" . }}
{{ include "meshgate.commonLabels" . }}
{{- end -}}

{{- define "meshgate.commonLabels" -}}
app.kubernetes.io/name: meshgate-provisioning-gateway
app.kubernetes.io/part-of: meshgate
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "meshgate.labels" -}}
{{ include "meshgate.commonLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "meshgate.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "meshgate.fullname" .) -}}
{{- end -}}

{{/* Binding names must be unique in the cluster. */}}
{{- define "meshgate.reviewsName" -}}
{{- printf "%s-reviews-%s" (include "meshgate.fullname" .) .Release.Namespace -}}
{{- end -}}

{{- define "meshgate.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{- define "meshgate.policy" -}}
{{- $policy := deepCopy .Values.policy -}}
{{- if not (hasKey $policy "gateway_image") -}}{{- $_ := set $policy "gateway_image" (include "meshgate.image" .) -}}{{- end -}}
{{- toPrettyJson $policy -}}
{{- end -}}
