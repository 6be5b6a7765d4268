use super::*;

/// An operation unrelated to language models.
struct Resize;

#[derive(Default)]
struct Picture {
    width: usize,
    gamma: Option<f32>,
}

impl Operation for Resize {
    type Request = Picture;
    type Service = str;
    const NAME: &'static str = "resize";
}

struct Fake {
    name: &'static str,
    rank: i32,
    missing: Option<&'static str>,
    widest: usize,
    supports_gamma: bool,
}

impl Fake {
    const fn new(name: &'static str, rank: i32) -> Self {
        Self { name, rank, missing: None, widest: 1000, supports_gamma: true }
    }
}

impl Provider<Resize> for Fake {
    fn name(&self) -> &str {
        self.name
    }
    fn rank(&self) -> i32 {
        self.rank
    }
    fn available(&self) -> Result<(), String> {
        self.missing.map_or(Ok(()), |missing| Err(missing.to_owned()))
    }
    fn can_serve(&self, request: &Picture) -> Result<(), Refusal> {
        if request.gamma.is_some() && !self.supports_gamma {
            return Err(Refusal::Argument { argument: "gamma" });
        }
        if request.width > self.widest {
            return Err(Refusal::TooLarge { what: "width", found: request.width, limit: self.widest });
        }
        Ok(())
    }
    fn service(&self) -> &str {
        self.name
    }
}

/// By rank: cpu (built in) < npu (does not support gamma) < gpu (small) < tpu (not available).
fn registry() -> Registry<Resize> {
    let mut registry = Registry::<Resize>::new(Box::new(Fake { widest: 5000, ..Fake::new("cpu", 0) }));
    registry.register(Box::new(Fake { supports_gamma: false, ..Fake::new("npu", 20) }));
    registry.register(Box::new(Fake { widest: 100, ..Fake::new("gpu", 30) }));
    registry.register(Box::new(Fake { missing: Some("no driver"), ..Fake::new("tpu", 100) }));
    registry
}

fn choose(width: usize, gamma: Option<f32>, environment: &[(&str, &str)]) -> Result<String, SelectError> {
    let look_up =
        |name: &str| environment.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string());
    registry().select(&Picture { width, gamma }, look_up).map(|provider| provider.service().to_owned())
}

#[test]
fn the_table_of_choices() {
    let own = "KVASIR_RESIZE_BACKEND";
    let all = "KVASIR_BACKEND";
    type Case<'a> = (&'a str, usize, Option<f32>, &'a [(&'a str, &'a str)], &'a str);
    let cases: &[Case<'_>] = &[
        ("unset: highest rank that is available", 50, None, &[], "gpu"),
        ("an empty value is unset", 50, None, &[(own, ""), (all, "")], "gpu"),
        ("the highest rank cannot serve", 500, None, &[], "npu"),
        ("a provider that would ignore an argument is passed over", 500, Some(2.0), &[], "cpu"),
        ("only the built-in provider can", 2000, None, &[], "cpu"),
        ("a hard select beats rank", 50, None, &[(own, "npu")], "npu"),
        ("the built-in provider can be demanded", 50, None, &[(all, "cpu")], "cpu"),
        (
            "the operation's own variable beats the general one",
            50,
            None,
            &[(all, "cpu"), (own, "npu")],
            "npu",
        ),
        ("another operation's variable has no effect", 50, None, &[("KVASIR_EMBED_BACKEND", "x")], "gpu"),
    ];
    for (label, width, gamma, environment, expected) in cases {
        assert_eq!(choose(*width, *gamma, environment).as_deref(), Ok(*expected), "{label}");
    }
}

#[test]
fn all_that_can_serve_are_candidates_by_rank_unless_one_is_named() {
    let registry = registry();
    let picture = |width| Picture { width, gamma: None };
    let names = |width, variable: Option<&str>| {
        let (first, rest) = registry.candidates(&picture(width), |_| variable.map(str::to_owned)).unwrap();
        let rest: Vec<String> = rest.iter().map(|provider| provider.name().to_owned()).collect();
        (first.name().to_owned(), rest.join(" "))
    };
    assert_eq!(names(50, None), ("gpu".into(), "npu cpu".into()));
    assert_eq!(names(500, None), ("npu".into(), "cpu".into()));
    assert_eq!(names(50, Some("npu")), ("npu".into(), String::new()));
    assert_eq!(registry.named("--backend", "cpu", &picture(50)).unwrap().name(), "cpu");
    let error = registry.named("--backend", "gpu", &picture(500)).err().unwrap().to_string();
    assert!(error.starts_with("--backend selects backend \"gpu\" for resize, which cannot serve"), "{error}");
}

#[test]
fn an_unusable_backend_in_the_environment_fails_with_its_reason() {
    let message = |width, gamma, environment: &[(&str, &str)]| {
        choose(width, gamma, environment).unwrap_err().to_string()
    };
    assert_eq!(
        message(50, None, &[("KVASIR_RESIZE_BACKEND", "dsp")]),
        "KVASIR_RESIZE_BACKEND selects backend \"dsp\" for resize, which is unknown; known are cpu, npu, gpu, tpu"
    );
    assert_eq!(
        message(50, None, &[("KVASIR_BACKEND", "tpu")]),
        "KVASIR_BACKEND selects backend \"tpu\" for resize, which is not available here: no driver"
    );
    assert_eq!(
        message(101, None, &[("KVASIR_BACKEND", "gpu")]),
        "KVASIR_BACKEND selects backend \"gpu\" for resize, which cannot serve this request: width is 101, at most 100"
    );
    assert_eq!(
        message(50, Some(2.2), &[("KVASIR_RESIZE_BACKEND", "npu"), ("KVASIR_BACKEND", "cpu")]),
        "KVASIR_RESIZE_BACKEND selects backend \"npu\" for resize, which cannot serve this request: \
         argument gamma is not supported"
    );
}

#[test]
fn a_request_that_no_provider_serves_is_an_error() {
    assert_eq!(
        choose(6000, None, &[]),
        Err(SelectError::NoProvider {
            operation: "resize",
            refusal: Refusal::TooLarge { what: "width", found: 6000, limit: 5000 }
        })
    );
}

#[test]
fn an_empty_registry_uses_the_built_in_provider_and_equal_ranks_keep_their_order() {
    let mut registry = Registry::<Resize>::new(Box::new(Fake::new("cpu", 0)));
    let chosen = |registry: &Registry<Resize>| {
        registry.select(&Picture::default(), |_| None).unwrap().name().to_owned()
    };
    assert_eq!(chosen(&registry), "cpu");
    registry.register(Box::new(Fake::new("slow", -1)));
    assert_eq!(chosen(&registry), "cpu");
    registry.register(Box::new(Fake::new("first", 5)));
    registry.register(Box::new(Fake::new("second", 5)));
    assert_eq!(chosen(&registry), "first");
    assert_eq!(registry.names(), ["cpu", "slow", "first", "second"]);
}

#[test]
fn without_a_built_in_provider_the_error_names_every_provider() {
    let empty = Registry::<Resize>::empty();
    let picture = |width| Picture { width, gamma: None };
    let error = empty.select(&picture(50), |_| None).err().map(|error| error.to_string());
    assert_eq!(error.as_deref(), Some("no backend serves resize"));
    let demand = |name: &str| (name == "KVASIR_BACKEND").then(|| "npu".to_owned());
    let error = empty.select(&picture(50), demand).err().map(|error| error.to_string());
    assert_eq!(
        error.as_deref(),
        Some("KVASIR_BACKEND selects backend \"npu\" for resize, which is unknown; known are none")
    );

    let mut registry = Registry::<Resize>::empty();
    registry.register(Box::new(Fake { widest: 100, ..Fake::new("gpu", 30) }));
    registry.register(Box::new(Fake { missing: Some("no driver"), ..Fake::new("tpu", 100) }));
    let chosen = registry.select(&picture(50), |_| None).map(|provider| provider.service().to_owned());
    assert_eq!(chosen.as_deref(), Ok("gpu"));
    let error = registry.select(&picture(101), |_| None).err().map(|error| error.to_string());
    assert_eq!(
        error.as_deref(),
        Some("no backend serves resize; gpu: width is 101, at most 100; tpu: no driver")
    );
}
