use super::*;
use consensus::table::{CacheGroup, Change, KeyIssued, KeyRecord, Quota, TenantTuned};
use dispatch::quota::Limit;
use futures::FutureExt;

fn entry(key: &str, tenant: &str, admin: bool) -> KeyEntry {
    KeyEntry { sha256: hex(&digest(key)), tenant: tenant.into(), admin }
}

fn digest(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

fn with(authorization: &str) -> HeaderMap {
    HeaderMap::from_iter([(header::AUTHORIZATION, authorization.parse().unwrap())])
}

fn fixed(entries: &[KeyEntry]) -> Result<Arc<Keys>, KeysError> {
    Keys::new(entries, ClusterKey([1; 32]), None)
}

fn tenant(name: &str) -> TenantId {
    TenantId::new(name).unwrap()
}

fn issued(key: &str, of: &str, scope: KeyScope, expires_unix_s: u64) -> Change {
    let key = KeyRecord { sha256: digest(key), tenant: tenant(of), admin: false, expires_unix_s };
    Change::KeyIssued(KeyIssued { key, scope, salt: TenantSalt([7; 32]) })
}

fn tuned(name: &str, quota: Quota, group: Option<&str>) -> Change {
    let group = group.map(|name| CacheGroup { name: tenant(name), salt: TenantSalt([8; 32]) });
    let salt = TenantSalt([9; 32]);
    Change::TenantTuned(TenantTuned { tenant: tenant(name), salt, quota, cache_group: group })
}

/// The tenant of `key`, if it is accepted.
fn tenant_of(keys: &Keys, key: &str) -> Result<String, ApiError> {
    keys.authenticate(&with(&format!("Bearer {key}"))).map(|caller| caller.tenant().to_string())
}

#[test]
fn a_key_selects_its_tenant_and_anything_else_is_refused() {
    let keys = fixed(&[entry("k-one", "a", false), entry("k-two", "b", true)]).unwrap();
    let authenticate =
        |text: &str| keys.authenticate(&with(text)).map(|c| (c.tenant().to_string(), c.admin()));
    assert_eq!(authenticate("Bearer k-one"), Ok(("a".into(), false)));
    assert_eq!(authenticate("bearer  k-two"), Ok(("b".into(), true)));
    for wrong in ["Bearer k-three", "Bearer ", "k-one", "Basic k-one", "Bearer k-one k-one", ""] {
        assert_eq!(authenticate(wrong), Err(ApiError::InvalidApiKey), "{wrong:?}");
    }
    assert_eq!(keys.authenticate(&HeaderMap::new()).map(drop), Err(ApiError::InvalidApiKey));
}

#[test]
fn without_keys_every_caller_is_the_default_tenant() {
    let keys = fixed(&[]).unwrap();
    for headers in [HeaderMap::new(), with("Bearer whatever")] {
        assert_eq!(&**keys.authenticate(&headers).unwrap().tenant(), DEFAULT_TENANT);
    }
}

#[test]
fn errors_name_the_entry_of_the_key_table() {
    let good = entry("k", "t", false);
    for sha256 in ["", "00", &"g".repeat(64), &"0".repeat(63), &"0".repeat(66)] {
        let bad = KeyEntry { sha256: (*sha256).to_owned(), ..good.clone() };
        assert_eq!(fixed(&[good.clone(), bad]).unwrap_err(), KeysError::BadDigest { at: 1 });
    }
    for tenant in ["", "A", "a b", &"x".repeat(64)] {
        let bad = KeyEntry { tenant: (*tenant).to_owned(), ..good.clone() };
        assert_eq!(fixed(&[bad]).unwrap_err(), KeysError::BadTenant { at: 0 });
    }
}

#[tokio::test]
async fn keys_follow_the_agreed_changes() {
    let keys = fixed(&[]).unwrap();
    let one = issued("one", "a", KeyScope::default(), 0);
    keys.agree(&Access::of([one.clone(), issued("old", "a", KeyScope::default(), 1)]).unwrap());
    assert_eq!(tenant_of(&keys, "one"), Ok("a".into()));
    assert_eq!(tenant_of(&keys, "old"), Err(ApiError::InvalidApiKey), "it has expired");
    let caller = keys.authenticate(&with("Bearer one")).unwrap();
    // Another change of the table does not end this wait.
    keys.agree(&Access::of([one.clone(), issued("two", "b", KeyScope::default(), 0)]).unwrap());
    assert_eq!(tenant_of(&keys, "two"), Ok("b".into()));
    assert!(tokio::time::timeout(std::time::Duration::ZERO, caller.revoked()).await.is_err());
    // A new expiry does not end it before that time.
    let ends = |at| Access::of([issued("one", "a", KeyScope::default(), at)]).unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    keys.agree(&ends(now + 3600));
    assert!(!caller.revocation().is_revoked());
    assert!(tokio::time::timeout(std::time::Duration::ZERO, caller.revoked()).await.is_err());
    let second = keys.authenticate(&with("Bearer one")).unwrap();
    let (mut early, mut late) = (Box::pin(caller.revoked()), Box::pin(second.revoked()));
    assert!((&mut early).now_or_never().is_none() && (&mut late).now_or_never().is_none());
    keys.agree(&ends(now.max(2) - 1));
    early.await;
    late.await;
    assert!(caller.revocation().is_revoked());
    assert_eq!(tenant_of(&keys, "one"), Err(ApiError::InvalidApiKey));
    keys.agree(&ends(0));
    assert_eq!(tenant_of(&keys, "one"), Ok("a".into()));
    let caller = keys.authenticate(&with("Bearer one")).unwrap();
    keys.agree(&Access::of([one, Change::KeyRevoked(digest("one"))]).unwrap());
    caller.revoked().await;
    assert_eq!(tenant_of(&keys, "one"), Err(ApiError::InvalidApiKey));
    // The last key is gone, and the API stays closed.
    assert!(!keys.is_open());
    assert_eq!(keys.count(), 0);
}

/// No change is agreed on meanwhile: the clock alone ends the key.
#[tokio::test]
async fn the_expiry_of_a_key_wakes_its_waiters() {
    let keys = fixed(&[]).unwrap();
    let expiry = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() + 2;
    keys.agree(&Access::of([issued("one", "a", KeyScope::default(), expiry)]).unwrap());
    let caller = keys.authenticate(&with("Bearer one")).unwrap();
    caller.revoked().await;
    assert!(caller.revocation().is_revoked());
    assert_eq!(tenant_of(&keys, "one"), Err(ApiError::InvalidApiKey));
}

#[test]
fn a_restart_does_not_open_a_closed_api() {
    let dir = tempfile::tempdir().unwrap();
    let start = || Keys::new(&[], ClusterKey([1; 32]), Some(dir.path())).unwrap();
    let keys = start();
    assert!(keys.is_open());
    let access = Access::of([issued("one", "a", KeyScope::default(), 0)]).unwrap();
    keys.agree(&access);
    // Before the agreed keys are known, the marker file says that keys exist.
    let again = start();
    assert_eq!(tenant_of(&again, "one"), Err(ApiError::KeysUnknown));
    again.agree(&access);
    assert_eq!(tenant_of(&again, "one"), Ok("a".into()));
    assert_eq!(tenant_of(&again, "two"), Err(ApiError::KeysUnknown));
    again.settle();
    assert_eq!(tenant_of(&again, "two"), Err(ApiError::InvalidApiKey));
}

#[test]
fn sec_tenant_salts() {
    let keys = fixed(&[entry("file", "f", false)]).unwrap();
    let changes = [
        issued("a", "a", KeyScope::default(), 0),
        tuned("b", Quota::default(), Some("g")),
        tuned("c", Quota::default(), Some("g")),
        tuned("f", Quota::default(), None),
    ];
    let derived = keys.salt("f");
    assert_eq!(derived, salt(&ClusterKey([1; 32]), "f"));
    assert_ne!(derived, salt(&ClusterKey([2; 32]), "f"));
    assert_ne!(derived, salt(&ClusterKey([1; 32]), "e"));
    keys.agree(&Access::of(changes).unwrap());
    assert_eq!((keys.salt("a"), keys.salt("f")), (TenantSalt([7; 32]), TenantSalt([9; 32])));
    assert_eq!((keys.salt("b"), keys.salt("c")), (TenantSalt([8; 32]), TenantSalt([8; 32])));
    // A request's salt narrows sharing, whatever it is, and never equals another tenant's.
    let (a, f) =
        (keys.authenticate(&with("Bearer a")).unwrap(), keys.authenticate(&with("Bearer file")).unwrap());
    assert_eq!(a.salt(None), keys.salt("a"));
    assert_eq!(a.salt(Some("x")), a.salt(Some("x")));
    let salts = [a.salt(None), a.salt(Some("x")), a.salt(Some("y")), f.salt(Some("x")), f.salt(None)];
    for (at, salt) in salts.iter().enumerate() {
        assert!(salts.iter().skip(at + 1).all(|other| other != salt));
    }
}

#[test]
fn a_key_is_for_its_models_and_within_its_limits_and_its_tenants() {
    let keys = fixed(&[]).unwrap();
    let model = |name: &str| ModelId::new(name).unwrap();
    let quota =
        |requests_per_minute, concurrency| Quota { requests_per_minute, tokens_per_minute: 0, concurrency };
    let scope = KeyScope { models: vec![model("m")], quota: quota(2, 0), created_unix_s: 1 };
    let first = [issued("k", "a", scope, 0), issued("l", "a", KeyScope::default(), 0)];
    keys.agree(&Access::of(first.clone()).unwrap());
    let (k, l) =
        (keys.authenticate(&with("Bearer k")).unwrap(), keys.authenticate(&with("Bearer l")).unwrap());
    assert_eq!([k.may_use(&model("m")), k.may_use(&model("n")), l.may_use(&model("n"))], [true, false, true]);
    let now = Instant::now();
    k.enter(now).unwrap();
    // Spending survives an unrelated change of the table.
    keys.agree(&Access::of(first.into_iter().chain([tuned("a", quota(0, 1), None)])).unwrap());
    let k = keys.authenticate(&with("Bearer k")).unwrap();
    let running = k.enter(now).unwrap();
    let limit = |caller: &Caller| match caller.enter(now) {
        Err(ApiError::RateLimited(exceeded)) => exceeded.limit,
        other => panic!("{other:?}"),
    };
    assert_eq!(limit(&k), Limit::Requests);
    let l = keys.authenticate(&with("Bearer l")).unwrap();
    assert_eq!(limit(&l), Limit::Concurrency);
    drop(running);
    l.enter(now).unwrap();
}

/// A digest that shares a long prefix with a known one takes no longer to be refused than any other: the
/// comparison does not depend on where two digests differ.
#[test]
fn sec_key_ct() {
    let secret = ring::Secret([0xa5; 32]);
    for at in 0..32 {
        let mut other = secret;
        other.0[at] ^= 1;
        assert!(secret != other, "{at}");
    }
    assert!(secret == ring::Secret([0xa5; 32]));
    let keys = fixed(&[entry("k", "a", false)]).unwrap();
    // The digest of the presented key is compared, so a guess controls none of its bytes.
    assert_eq!(tenant_of(&keys, &hex(&digest("k"))), Err(ApiError::InvalidApiKey));
}
