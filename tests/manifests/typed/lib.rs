//! Reads a rendered manifest as the type of its kind and writes it back: what is lost on the way is a field that
//! Kubernetes, or the extension that brings the kind, does not know; what is refused has the wrong type.

mod pool;

use k8s_openapi::api::apps::v1::{DaemonSet, StatefulSet};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{
    ConfigMap, Namespace, PersistentVolume, PersistentVolumeClaim, Secret, Service, ServiceAccount,
};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kcr_cert_manager_io::v1::{certificates::Certificate, issuers::Issuer};
use kcr_gateway_networking_k8s_io::v1::httproutes::HTTPRoute;
use kcr_keda_sh::v1alpha1::scaledobjects::ScaledObject;
use kcr_monitoring_coreos_com::v1::{
    podmonitors::PodMonitor, prometheusrules::PrometheusRule, servicemonitors::ServiceMonitor,
};
use pool::InferencePool;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The manifest as it is after having been one of these types; `None` for a kind that none is of.
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
        ("cert-manager.io/v1", "Certificate") => through::<Certificate>(manifest),
        ("cert-manager.io/v1", "Issuer") => through::<Issuer>(manifest),
        ("gateway.networking.k8s.io/v1", "HTTPRoute") => through::<HTTPRoute>(manifest),
        ("inference.networking.k8s.io/v1", "InferencePool") => through::<InferencePool>(manifest),
        ("keda.sh/v1alpha1", "ScaledObject") => through::<ScaledObject>(manifest),
        ("monitoring.coreos.com/v1", "PodMonitor") => through::<PodMonitor>(manifest),
        ("monitoring.coreos.com/v1", "PrometheusRule") => through::<PrometheusRule>(manifest),
        ("monitoring.coreos.com/v1", "ServiceMonitor") => through::<ServiceMonitor>(manifest),
        _ => return None,
    })
}

fn through<T: Serialize + DeserializeOwned>(manifest: &Value) -> Result<Value, serde_json::Error> {
    serde_json::to_value(T::deserialize(manifest)?)
}

/// Paths of what `sent` says and `kept` does not.
pub fn lost(sent: &Value, kept: &Value) -> Vec<String> {
    let mut paths = Vec::new();
    compare(sent, kept, "", &mut paths);
    paths
}

fn compare(sent: &Value, kept: &Value, path: &str, paths: &mut Vec<String>) {
    match (sent, kept) {
        (Value::Object(fields), Value::Object(_)) => {
            fields
                .iter()
                .for_each(|(name, value)| compare(value, &kept[name], &format!("{path}.{name}"), paths));
        }
        (Value::Array(items), Value::Array(others)) if items.len() == others.len() => {
            for (at, (item, other)) in items.iter().zip(others).enumerate() {
                compare(item, other, &format!("{path}[{at}]"), paths);
            }
        }
        // An empty list is not written.
        (Value::Array(items), Value::Null) if items.is_empty() => {}
        (sent, kept) if sent == kept => {}
        _ => paths.push(path.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::BTreeSet;

    /// Groups of Kubernetes itself that are written as extensions' are.
    const KUBERNETES: [&str; 3] = ["networking.k8s.io", "rbac.authorization.k8s.io", "scheduling.k8s.io"];

    /// Every manifest that `python tests/manifests` has rendered, in the directory that KVASIR_MANIFESTS names.
    #[test]
    fn every_manifest_is_what_kubernetes_reads() {
        let dir = std::env::var("KVASIR_MANIFESTS").expect("KVASIR_MANIFESTS: where rendered manifests are");
        let (mut typed, mut extensions) = (0, BTreeSet::new());
        for file in std::fs::read_dir(dir).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let manifests: Vec<Value> =
                serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
            for mut manifest in manifests {
                on_one_line(&mut manifest);
                let name =
                    format!("{} {} {}", path.display(), manifest["kind"], manifest["metadata"]["name"]);
                let Some(kept) = round_trip(&manifest) else {
                    // What kustomize itself reads, and no cluster.
                    assert_eq!(manifest["apiVersion"], "builtin", "{name}: there is no such kind here");
                    continue;
                };
                let kept = kept.unwrap_or_else(|error| panic!("{name}: {error}"));
                assert_eq!(
                    lost(&manifest, &kept),
                    Vec::<String>::new(),
                    "{name}: Kubernetes does not know these"
                );
                typed += 1;
                let (group, _) =
                    manifest["apiVersion"].as_str().unwrap().rsplit_once('/').unwrap_or_default();
                // Kubernetes' own groups are short, or end so and are no extension's.
                if group.contains('.') && !KUBERNETES.contains(&group) {
                    extensions.insert(manifest["kind"].as_str().unwrap().to_owned());
                }
            }
        }
        assert!(typed > 80, "{typed} manifests");
        let all = ["Certificate", "HTTPRoute", "InferencePool", "Issuer"];
        let all = all.into_iter().chain(["PodMonitor", "PrometheusRule", "ScaledObject", "ServiceMonitor"]);
        assert_eq!(extensions, all.map(str::to_owned).collect());
    }

    /// Kustomize breaks the base64 of a Secret into lines. Kubernetes reads that, its types in Rust do not.
    fn on_one_line(manifest: &mut Value) {
        if manifest["kind"] == "Secret"
            && let Some(data) = manifest["data"].as_object_mut()
        {
            for value in data.values_mut() {
                *value = value.as_str().expect("base64").replace('\n', "").into();
            }
        }
    }

    #[test]
    fn what_kubernetes_does_not_know_is_found() {
        let mut set = json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "s"}, "spec": {
            "selector": {}, "serviceName": "s",
            "template": {"spec": {"terminationGracePeriodSecs": 5, "containers": [{"name": "c"}]}},
        }});
        let lost_of = |set: &Value| lost(set, &round_trip(set).unwrap().unwrap());
        assert_eq!(lost_of(&set), [".spec.template.spec.terminationGracePeriodSecs"]);
        set["spec"]["replicas"] = json!("three");
        assert!(round_trip(&set).unwrap().is_err());
        assert!(round_trip(&json!({"apiVersion": "keda.sh/v2", "kind": "ScaledObject"})).is_none());
    }

    #[test]
    fn what_extensions_do_not_know_is_found() {
        let scaled = |spec: Value| json!({"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": {"name": "s"}, "spec": spec});
        let target = json!({"name": "w"});
        let known = scaled(json!({"scaleTargetRef": target, "triggers": [], "maxReplicas": 4}));
        assert_eq!(lost(&known, &round_trip(&known).unwrap().unwrap()), [".spec.maxReplicas"]);
        assert!(round_trip(&scaled(json!({"triggers": []}))).unwrap().is_err(), "nothing is scaled");
        let pool = |change: &dyn Fn(&mut Value)| {
            let mut pool = json!({
                "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": {"name": "p"},
                "spec": {
                    "selector": {"matchLabels": {"app": "p"}}, "targetPorts": [{"number": 8080}],
                    "endpointPickerRef": {"name": "n", "port": {"number": 1}, "failureMode": "FailOpen"},
                },
            });
            change(&mut pool["spec"]);
            round_trip(&pool).unwrap()
        };
        assert!(pool(&|_| ()).is_ok());
        let wrong: [&dyn Fn(&mut Value); 7] = [
            &|spec| spec["targetPorts"] = json!([]),
            &|spec| spec["targetPorts"][0]["number"] = json!(0),
            &|spec| spec["selector"]["matchLabels"] = json!({}),
            &|spec| spec["selector"]["matchLabels"]["app"] = json!("-"),
            &|spec| spec["endpointPickerRef"]["failureMode"] = json!("Open"),
            &|spec| spec["endpointPickerRef"]["port"] = Value::Null,
            &|spec| spec["extensionRef"] = json!({"name": "n"}),
        ];
        for (number, change) in wrong.iter().enumerate() {
            assert!(pool(*change).is_err(), "the wrong pool {number}");
        }
    }
}
