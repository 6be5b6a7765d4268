use super::*;

#[test]
fn a_data_url_names_its_file() {
    let file = |url: &str| file_of_data_url(url).map(|start| url[start..].to_owned());
    for url in ["data:image/png;base64,QUJD", "DATA:IMAGE/png;charset=x;BASE64,QUJD", "data:;base64,QUJD"] {
        assert_eq!(file(url), Ok("QUJD".to_owned()), "{url}");
    }
    for (url, fault) in [
        ("ftp://example.com/a.png", "is no data: URL"),
        ("file:///etc/passwd", "is no data: URL"),
        ("", "is no data: URL"),
        ("datä:", "is no data: URL"),
        ("data:image/png;base64", "has no comma"),
        ("data:image/png,QUJD", "is not in base64"),
        ("data:text/plain;base64,QUJD", "\"text/plain\" is no image's"),
        (&format!("data:{},QUJD", "x".repeat(300)), "has no comma"),
    ] {
        let refused = file(url).unwrap_err();
        assert!(refused.contains(fault) && refused.len() < 200, "{url}: {refused}");
    }
}

#[test]
fn the_number_of_images_is_limited() {
    let mut images = GivenImages::default();
    let image = |at: usize| in_base64(format!("field {at}"), "QUJD".into());
    for at in 0..MAX_IMAGES {
        assert_eq!(images.add(image(at)), Ok(at));
    }
    let refused = images.add(image(MAX_IMAGES)).unwrap_err();
    assert_eq!(refused, ApiError::field("field 64", "the request has more than 64 images"));
}

#[test]
fn images_of_all_requests_have_a_limit() {
    let held = HeldImages::default();
    let image = |bytes: usize| PromptImage { file: vec![0; bytes].into(), digest: [0; 32], runs: Vec::new() };
    let all = vec![image(MAX_IMAGE_BYTES); MAX_HELD_IMAGE_BYTES / MAX_IMAGE_BYTES];
    let first = held.hold(&all).unwrap();
    let more = [image(MAX_IMAGE_BYTES)];
    for _ in 0..2 {
        assert_eq!(held.hold(&more).map(drop), Err(ApiError::QueueFull { retry_after: HELD_RETRY }));
    }
    assert!(held.hold(&[]).is_ok());
    drop(first);
    assert!(held.hold(&more).is_ok());
    assert_eq!(held.0.load(Ordering::Relaxed), 0);
}

#[test]
fn parts_without_images_are_one_text() {
    let text = |text: &'static str| Part::Text(text.into());
    assert_eq!(content_of(vec![text("a"), text("b")]), Content::Text("a\nb".into()));
    assert_eq!(content_of(Vec::new()), Content::Text("".into()));
    let seen = vec![text("a"), Part::Image(0)];
    assert_eq!(content_of(seen.clone()), Content::Parts(seen));
}
