use super::*;
use ::usage::recorder::Recorder;
use api::auth::{KeyEntry, hex};
use axum::body::Body;
use http_body_util::BodyExt;
use pki::ca::Authority;
use proto::ids::{ClusterName, Role};
use router::balancer::Policy;
use sha2::{Digest, Sha256};
use std::net::SocketAddr;
use std::path::Path as FilePath;
use std::time::SystemTime;
use tower::ServiceExt;
use transport::heartbeat::Heartbeat;

/// Paths without authentication, besides the dashboard's files, which have no data of the cluster.
const OPEN: [&str; 4] = ["/livez", "/startupz", "/readyz", "/metrics"];

fn entry(key: &str, tenant: &str, admin: bool) -> KeyEntry {
    KeyEntry { sha256: hex(&Sha256::digest(key)), tenant: tenant.into(), admin }
}

fn identity() -> Identity {
    let (cluster, now) = (ClusterName::new("c").unwrap(), SystemTime::now());
    let authority = Authority::new(cluster, now).unwrap();
    authority.issue(Role::Coordinator, NodeId::new("c1").unwrap(), now).unwrap().identity().unwrap()
}

fn port() -> Router {
    port_with(Vec::new())
}

fn port_with(loops: Vec<Heartbeat>) -> Router {
    let metrics = Arc::new(Metrics::new(None));
    let cluster_key = ClusterKey([1; 32]);
    let entries = [entry("user", "a", false), entry("admin", "b", true)];
    let node = NodeId::new("c1").unwrap();
    let ops = Arc::new(Ops {
        id: node.clone(),
        dispatch: Dispatch::new(
            Policy::default(),
            Arc::clone(&metrics),
            Default::default(),
            Arc::new(Recorder::new(node.clone(), 1)),
        ),
        agreement: None,
        replicas: None,
        deployments: None,
        models: Arc::new(Models::open(&[], false).unwrap()),
        keys: Keys::new(&entries, cluster_key.clone(), None).unwrap(),
        chains: Arc::new(ChainMemo::new(&cluster_key, 1 << 10)),
        cluster_key,
        planning: PlanningThreads::new(1),
        metrics,
        raft: None,
        feed: dashboard::Feed::default(),
        audit: Arc::new(Audit::open(None, node).unwrap()),
        gate: ReadyGate::new(false),
        identity: identity(),
        loops,
    });
    // The API has its own authentication and its own test.
    router(ops, Router::new())
}

/// All paths with a route in this port's sources, so that new ones are tested automatically.
fn routes() -> Vec<String> {
    let directory = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let entries = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    let mut found = Vec::new();
    for file in files.filter(|path| !path.ends_with("tests.rs")) {
        let text = std::fs::read_to_string(&file).unwrap();
        for call in text.split(".route(").skip(1) {
            if call.starts_with("path, file(") {
                continue;
            }
            let path = call.trim_start().strip_prefix('"').and_then(|path| path.split('"').next());
            found.push(
                path.unwrap_or_else(|| panic!("{}: a route that cannot be read", file.display())).to_owned(),
            );
        }
    }
    found
}

/// Status, and whether the route has the method.
async fn send(router: &Router, from: &str, method: &Method, path: &str, key: Option<&str>) -> (u16, bool) {
    let peer: SocketAddr = from.parse().unwrap();
    let mut request = axum::http::Request::builder().method(method).uri(path);
    if let Some(key) = key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let mut request = request.body(Body::empty()).unwrap();
    request.extensions_mut().insert(Peer(peer));
    let response = router.clone().oneshot(request).await.unwrap();
    let status = response.status().as_u16();
    if status == 405 {
        assert!(response.headers().contains_key(header::ALLOW), "{method} {path}");
        return (status, false);
    }
    // Some responses never end.
    if status != 404 {
        return (status, true);
    }
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let not_found = ApiError::NotFound.body().to_string();
    (status, body != not_found.as_bytes())
}

#[tokio::test]
async fn sec_ops_routes() {
    let router = port();
    let routes = routes();
    assert!(
        routes.len() >= 15 && OPEN.iter().all(|open| routes.iter().any(|route| route == open)),
        "{routes:?}"
    );
    let (near, far) = ("127.0.0.1:9", "10.0.0.7:9");
    for route in routes {
        let path = route
            .replace("{id}", "x")
            .replace("{digest}", "x")
            .replace("{role}", "worker")
            .replace("{tenant}", "x")
            .replace("{model}", "x");
        assert!(!path.contains('{'), "{route}: what stands for its parameter?");
        let (open, mut methods) = (OPEN.contains(&path.as_str()), 0);
        for method in [Method::GET, Method::POST, Method::PUT, Method::DELETE] {
            for (key, refusal) in [(None, 401), (Some("nobody"), 401), (Some("user"), 403)] {
                let (status, served) = send(&router, far, &method, &path, key).await;
                assert!(!served || open || status == refusal, "{method} {path} with {key:?}: {status}");
                methods += usize::from(served);
            }
            // An admin key, or a caller on this machine, is never refused.
            for (from, key) in [(far, Some("admin")), (near, None)] {
                let (status, _) = send(&router, from, &method, &path, key).await;
                assert!(![401, 403].contains(&status), "{method} {path} from {from}: {status}");
            }
        }
        assert!(methods > 0, "{route} has no method that is tried here");
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_with_a_stopped_loop_is_not_alive() {
    let past = std::time::Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
    let (beats, stands) = (Heartbeat::new("the runtime"), Heartbeat::since("the dispatcher", past));
    let port = port_with(vec![beats, stands.clone()]);
    let probe = async || {
        let request = Request::builder().uri("/livez").body(Body::empty()).unwrap();
        let answer = port.clone().oneshot(request).await.unwrap();
        let status = answer.status();
        (status, answer.into_body().collect().await.unwrap().to_bytes())
    };
    let (status, why) = probe().await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(why, "the dispatcher is stuck\n");
    stands.beat();
    assert_eq!(probe().await.0, StatusCode::OK);
}
