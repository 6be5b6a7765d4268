use super::*;

fn usage() -> Value {
    let row = |tenant: &str, model: &str, device: Option<f64>, energy: Option<f64>| {
        json!({
            "tenant": tenant, "model": model, "requests": 2, "prompt_tokens": 3_000_000,
            "cached_tokens": 1_000_000, "generated_tokens": 500_000, "recomputed_tokens": 7, "audio_s": 60.0,
            "attempts": 4, "timed_attempts": if device.is_some() { 4 } else { 0 }, "device_s": device,
            "recomputed_device_s": device.map(|_| 0.5), "energy_j": energy, "recomputed_energy_j": energy,
            "energy_device_s": energy.and(device),
        })
    };
    json!({
        "from_unix_s": 0, "until_unix_s": 1, "by": ["tenant", "model"],
        "rows": [row("a", "m", Some(7_200.0), Some(3.6e6)), row("b", "chat@1a2b3c4d5e6f", Some(3_600.0), None), row("c", "other,\"x\"", None, None)],
        "total": row("", "", Some(10_800.0), Some(3.6e6)),
    })
}

#[test]
fn a_table_has_a_dash_for_what_was_not_measured() {
    let mut usage = usage();
    usage["total"]["energy_device_s"] = json!(7_200.0);
    let text = table(&usage);
    let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(words[0][..5], ["TENANT", "MODEL", "REQUESTS", "PROMPT", "CACHED"]);
    assert_eq!(words[1], ["a", "m", "2", "3000000", "1000000", "500000", "7", "7200.000", "3600000.0"]);
    assert_eq!(words[2][7..], ["3600.000", "-"]);
    assert_eq!(words[3][7..], ["-", "-"]);
    assert_eq!(words[4][0], "total");
    assert!(words[4].ends_with(&["3600000.0", "(67", "%)"]), "{:?}", words[4]);
}

#[test]
fn csv_has_empty_fields_for_what_was_not_measured_and_quotes_names() {
    let text = csv(&usage());
    let lines: Vec<&str> = text.split("\r\n").collect();
    assert!(lines[0].starts_with("tenant,model,requests,prompt_tokens,"));
    assert_eq!(lines[0].split(',').count(), 2 + AMOUNTS.len());
    assert_eq!(lines[1].split(',').count(), 2 + AMOUNTS.len());
    assert_eq!(lines[2], "b,chat@1a2b3c4d5e6f,2,3000000,1000000,500000,7,60.0,3600.0,0.5,,,,4,4");
    assert_eq!(lines[3], "c,\"other,\"\"x\"\"\",2,3000000,1000000,500000,7,60.0,,,,,,4,0");
    assert_eq!(lines[4], "");
}

#[test]
fn times_are_those_of_the_calendar() {
    assert_eq!(moment(0, "hour"), "1970-01-01T00:00Z");
    assert_eq!(moment(951_782_400, "day"), "2000-02-29");
    assert_eq!(moment(1_796_079_600, "hour"), "2026-11-30T23:00Z");
    assert_eq!(moment(4_107_542_399, "day"), "2100-02-28");
    assert_eq!(moment(4_107_542_400, "day"), "2100-03-01");
}

const PRICES: &str = r#"
    currency = "EUR"
    [default]
    generated = 2.0
    [models.m]
    prompt = 1.0
    cached = 0.1
    device_hour = 3.0
    kwh = 0.25
    [models.chat]
    device_hour = 1.0
    audio_minute = 0.5
"#;

#[test]
fn a_cost_is_the_sum_of_what_was_used() {
    let mut usage = usage();
    Prices::parse(PRICES).unwrap().apply(&mut usage).unwrap();
    let cost = |row: usize| usage["rows"][row]["cost"].as_f64().unwrap();
    assert!((cost(0) - (2.0 + 0.1 + 6.0 + 0.25)).abs() < 1e-9, "{}", cost(0));
    assert!((cost(1) - 1.5).abs() < 1e-9, "a version has the prices of its model: {}", cost(1));
    assert!((cost(2) - 1.0).abs() < 1e-9, "{}", cost(2));
    assert!((usage["total"]["cost"].as_f64().unwrap() - 10.85).abs() < 1e-9);
    assert!(table(&usage).lines().next().unwrap().ends_with("COST EUR"));
    assert!(csv(&usage).lines().next().unwrap().ends_with(",cost_EUR"));
}

#[test]
fn a_cost_that_needs_an_unknown_value_is_unknown() {
    let mut usage = usage();
    let prices = "currency = \"EUR\"\n[default]\nkwh = 0.3";
    Prices::parse(prices).unwrap().apply(&mut usage).unwrap();
    assert!(usage["rows"][0]["cost"].is_f64());
    assert!(usage["rows"][1]["cost"].is_null() && usage["total"]["cost"].is_null());
    assert!(csv(&usage).lines().nth(2).unwrap().ends_with(','));
    assert!(table(&usage).lines().nth(2).unwrap().ends_with('-'));
    // Half of the attempts were not timed.
    usage["rows"][0]["timed_attempts"] = json!(2);
    Prices::parse("currency = \"EUR\"\n[default]\ndevice_hour = 1.0").unwrap().apply(&mut usage).unwrap();
    assert!(usage["rows"][0]["cost"].is_null());
}

#[test]
fn a_price_that_cannot_be_is_refused_by_name() {
    for (text, part) in [
        ("currency = \"EUR\"\n[models.m]\nprompt = -1.0", "models.m.prompt: -1"),
        ("currency = \"EUR\"\n[default]\nkwh = nan", "default.kwh: NaN"),
        ("currency = \"Euros, many\"", "currency"),
        ("currency = \"EUR\"\n[default]\npromt = 1.0", "promt"),
        ("[default]", "currency"),
    ] {
        let error = format!("{:#}", Prices::parse(text).unwrap_err());
        assert!(error.contains(part), "{error}");
    }
}
