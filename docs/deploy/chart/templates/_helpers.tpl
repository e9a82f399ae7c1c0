{{- define "dynctl.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "dynctl.labels" -}}
app.kubernetes.io/name: dynctl
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "dynctl.env" -}}
{{- if .root.Values.adminToken.secret }}
- name: DYNCTL_ADMIN_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.adminToken.secret }}
      key: {{ .root.Values.adminToken.key }}
{{- end }}
{{- with .values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "dynctl.pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  seccompProfile:
    type: RuntimeDefault
terminationGracePeriodSeconds: 60
volumes:
- name: tmp
  emptyDir: {}
{{- end -}}

{{- define "dynctl.container" -}}
image: {{ include "dynctl.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop:
    - ALL
volumeMounts:
- name: tmp
  mountPath: /tmp
resources:
  {{- toYaml .values.resources | nindent 2 }}
{{- end -}}

{{- define "dynctl.http" -}}
{{- include "dynctl.startup" . }}
  httpGet:
    path: /live
    port: status
livenessProbe:
  httpGet:
    path: /live
    port: status
  timeoutSeconds: 5
readinessProbe:
  httpGet:
    path: {{ .ready }}
    port: status
  timeoutSeconds: 5
{{- end -}}

{{- /* Two minutes to start: on a node under load, Python's imports alone can take 30 s. */}}
{{- define "dynctl.startup" -}}
startupProbe:
  periodSeconds: 2
  failureThreshold: 60
  timeoutSeconds: 5
{{- end -}}
