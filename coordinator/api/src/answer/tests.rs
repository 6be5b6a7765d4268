use super::super::responses::tests::tokenizer;
use super::*;
use text::ChatTemplate;

const HERMES: &str = "{% if tools %}<tool_call></tool_call>{% endif %}<think>";

/// An answer as the client receives it, sent letter by letter, and its finish reason.
struct Received {
    text: String,
    thought: String,
    arguments: Vec<String>,
    reason: FinishReason,
    matched: Option<String>,
    called: bool,
    tokens: u64,
}

fn receive(answer: &str, stop: &[&str], min_tokens: u64, reason: FinishReason) -> Received {
    let template = ChatTemplate::new(HERMES, "", "").unwrap();
    let dialect = Arc::new(Dialect::of(Some(&template), &tokenizer()));
    let strings: Vec<String> = stop.iter().map(|text| (*text).to_owned()).collect();
    let stop = Stop::new(&strings, min_tokens, AbortHandle::new_pair().0);
    let parser = OutputParser::new(Arc::clone(&dialect), vec!["f".into()], false);
    let mut progress = Progress::new(Instant::now(), 1, Some(parser), Some(stop));
    let mut all = Delta::default();
    let letters: Vec<TokenOut> =
        answer.chars().map(|c| TokenOut { id: u32::MAX, text: c.into(), logprobs: None }).collect();
    for pair in letters.chunks(2) {
        let mut tokens = pair.to_vec();
        all.add(progress.parse_tokens(&dialect, &mut tokens));
        if progress.stop.as_ref().is_some_and(|stop| stop.found.is_some()) {
            break;
        }
    }
    let matched = progress.stop.as_ref().and_then(|stop| stop.found.clone());
    let mut finished = Finished {
        reason: if matched.is_some() { FinishReason::Stop } else { reason },
        matched,
        tail: String::new(),
        completion_tokens: 0,
        cached_tokens: None,
        preemptions: 0,
        drafted_tokens: 0,
        accepted_tokens: 0,
    };
    all.add(progress.parse_last(&dialect, &mut finished));
    let mut received = Received {
        text: String::new(),
        thought: String::new(),
        arguments: Vec::new(),
        reason: finished.reason,
        matched: finished.matched,
        called: all.called,
        tokens: progress.completion,
    };
    for part in all.parts {
        match part {
            DeltaPart::Text(text) => received.text += &text,
            DeltaPart::Thought(text) => received.thought += &text,
            DeltaPart::Call(call) => received.arguments.push(call.arguments),
        }
    }
    received
}

#[test]
fn stop_strings_are_searched_in_the_text_only() {
    use FinishReason::{Length, Stop};
    let answer = "<think>So, END, }.</think>Hello, you.<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"END\"}}</tool_call>";
    // Reasoning and tool calls are not searched.
    for stop in ["END", "}", "\"", "think", "tool_call", "you.<", ".{"] {
        let received = receive(answer, &[stop], 0, Stop);
        assert_eq!(
            (received.thought.as_str(), received.text.as_str()),
            ("So, END, }.", "Hello, you."),
            "{stop}"
        );
        assert_eq!(
            (received.arguments, received.called),
            (vec!["{\"a\": \"END\"}".to_owned()], true),
            "{stop}"
        );
        assert_eq!((received.reason, received.matched), (Stop, None), "{stop}");
    }
    let receive_at = |stop: &[&str], min| receive(answer, stop, min, Stop);
    let found = receive_at(&["nothing", ", y"], 0);
    assert_eq!((found.text.as_str(), found.matched.as_deref()), ("Hello", Some(", y")));
    assert!(found.arguments.is_empty() && !found.called && found.reason == Stop);
    assert_eq!(found.tokens, answer.find(", y").unwrap() as u64 + 3);
    // Before min_tokens.
    assert_eq!(receive_at(&["Hello"], 60).text, "Hello, you.");
    // Held back until the end, since it could begin a tool call.
    let held_back = receive("Hello <", &["<"], 0, Stop);
    assert_eq!(
        (held_back.text.as_str(), held_back.matched.as_deref(), held_back.reason),
        ("Hello ", Some("<"), Stop)
    );
    // A cut tool call is not complete, and no mark appears in the text.
    let call = answer.find("<tool_call>").unwrap();
    for end in call + 1..answer.len() {
        let received = receive(&answer[..end], &["END"], 0, Length);
        assert!(
            received.text == "Hello, you." || (end == call + 1 && received.text.ends_with('<')),
            "{}",
            received.text
        );
        assert_eq!((received.reason, received.matched), (Length, None));
        // A stop token of the request ends the answer in the middle of a call.
        let stopped = receive(&answer[..end], &["nothing"], 0, Stop);
        let complete = serde_json::from_str::<serde_json::Value>(&stopped.arguments.concat()).is_ok();
        assert_eq!(stopped.called, complete, "{}", &answer[..end]);
    }
}
