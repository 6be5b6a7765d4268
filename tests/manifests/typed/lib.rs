//! Reads a rendered manifest as the type of its kind and writes it back: a field that is lost is not in the
//! Kubernetes API, and a refused manifest has a value of the wrong type.

use k8s_openapi::api::apps::v1::{DaemonSet, StatefulSet};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{
    ConfigMap, Namespace, PersistentVolume, PersistentVolumeClaim, Secret, Service, ServiceAccount,
};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The manifest as it is after having been one of Kubernetes' types; `None` for a kind that Kubernetes itself lacks.
pub fn round_trip(manifest: &Value) -> Option<Result<Value, serde_json::Error>> {
    let kind = (manifest["apiVersion"].as_str()?, manifest["kind"].as_str()?);
    Some(match kind {
        ("v1", "ConfigMap") => through::<ConfigMap>(manifest),
        ("v1", "Namespace") => through::<Namespace>(manifest),
        ("v1", "PersistentVolume") => through::<PersistentVolume>(manifest),
        ("v1", "PersistentVolumeClaim") => through::<PersistentVolumeClaim>(manifest),
        ("v1", "Secret") => through::<Secret>(manifest),
        ("v1", "Service") => through::<Service>(manifest),
        ("v1", "ServiceAccount") => through::<ServiceAccount>(manifest),
        ("apps/v1", "DaemonSet") => through::<DaemonSet>(manifest),
        ("apps/v1", "StatefulSet") => through::<StatefulSet>(manifest),
        ("batch/v1", "Job") => through::<Job>(manifest),
        ("networking.k8s.io/v1", "NetworkPolicy") => through::<NetworkPolicy>(manifest),
        ("policy/v1", "PodDisruptionBudget") => through::<PodDisruptionBudget>(manifest),
        ("rbac.authorization.k8s.io/v1", "Role") => through::<Role>(manifest),
        ("rbac.authorization.k8s.io/v1", "RoleBinding") => through::<RoleBinding>(manifest),
        ("scheduling.k8s.io/v1", "PriorityClass") => through::<PriorityClass>(manifest),
        _ => return None,
    })
}

fn through<T: Serialize + DeserializeOwned>(manifest: &Value) -> Result<Value, serde_json::Error> {
    serde_json::to_value(T::deserialize(manifest)?)
}

/// Paths of the fields of `sent` that `parsed` lacks.
pub fn lost(sent: &Value, parsed: &Value) -> Vec<String> {
    let mut paths = Vec::new();
    compare(sent, parsed, "", &mut paths);
    paths
}

fn compare(sent: &Value, parsed: &Value, path: &str, paths: &mut Vec<String>) {
    match (sent, parsed) {
        (Value::Object(fields), Value::Object(_)) => {
            fields
                .iter()
                .for_each(|(name, value)| compare(value, &parsed[name], &format!("{path}.{name}"), paths));
        }
        (Value::Array(items), Value::Array(others)) if items.len() == others.len() => {
            for (at, (item, other)) in items.iter().zip(others).enumerate() {
                compare(item, other, &format!("{path}[{at}]"), paths);
            }
        }
        // An empty list is not written.
        (Value::Array(items), Value::Null) if items.is_empty() => {}
        (sent, parsed) if sent == parsed => {}
        _ => paths.push(path.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Every manifest that `python tests/manifests` has rendered, in the directory that KVASIR_MANIFESTS names.
    #[test]
    fn every_manifest_is_what_kubernetes_reads() {
        let dir = std::env::var("KVASIR_MANIFESTS").expect("KVASIR_MANIFESTS: where rendered manifests are");
        let (mut typed, mut custom) = (0, 0);
        for file in std::fs::read_dir(dir).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let manifests: Vec<Value> =
                serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
            for mut manifest in manifests {
                join_lines(&mut manifest);
                let name =
                    format!("{} {} {}", path.display(), manifest["kind"], manifest["metadata"]["name"]);
                let Some(parsed) = round_trip(&manifest) else {
                    let group = manifest["apiVersion"].as_str().unwrap_or_default();
                    assert!(
                        group.contains('.') || group == "builtin",
                        "{name}: {group} has no such kind here"
                    );
                    custom += 1;
                    continue;
                };
                let parsed = parsed.unwrap_or_else(|error| panic!("{name}: {error}"));
                assert_eq!(
                    lost(&manifest, &parsed),
                    Vec::<String>::new(),
                    "{name}: Kubernetes does not know these"
                );
                typed += 1;
            }
        }
        assert!(typed > 60 && custom > 10, "{typed} and {custom} manifests");
    }

    /// Kustomize breaks the base64 of a Secret into lines. Kubernetes reads that, its types in Rust do not.
    fn join_lines(manifest: &mut Value) {
        if manifest["kind"] == "Secret"
            && let Some(data) = manifest["data"].as_object_mut()
        {
            for value in data.values_mut() {
                *value = value.as_str().expect("base64").replace('\n', "").into();
            }
        }
    }

    #[test]
    fn fields_unknown_to_kubernetes_are_found() {
        let mut set = json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "s"}, "spec": {
            "selector": {}, "serviceName": "s",
            "template": {"spec": {"terminationGracePeriodSecs": 5, "containers": [{"name": "c"}]}},
        }});
        let lost_of = |set: &Value| lost(set, &round_trip(set).unwrap().unwrap());
        assert_eq!(lost_of(&set), [".spec.template.spec.terminationGracePeriodSecs"]);
        set["spec"]["replicas"] = json!("three");
        assert!(round_trip(&set).unwrap().is_err());
        assert!(round_trip(&json!({"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject"})).is_none());
    }
}
