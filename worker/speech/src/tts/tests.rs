//! Sessions with a network whose audio is its phonemes; phonemes as Piper makes them.

use super::*;

/// Speaks each phoneme as `1 / speed` samples. Its phonemes are the words' letters.
struct Letters([String; 2]);

impl Network for Letters {
    fn rate(&self) -> u32 {
        8_000
    }

    fn names(&self) -> &[String] {
        &self.0
    }

    fn phonemes(&self, clause: &Clause, _: usize) -> Result<String, Error> {
        let words = clause.text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
        Ok(words.filter(|word| *word != "mute").collect::<Vec<_>>().join(" "))
    }

    fn speak(&self, phonemes: &str, voice: usize, speed: f32) -> Result<Vec<f32>, Error> {
        let sample = |c: char| (c as u32 + voice as u32) as f32 / 256.0;
        let each = (1.0 / speed) as usize;
        Ok(phonemes.chars().flat_map(|c| vec![sample(c); each]).collect())
    }

    fn pause(&self) -> usize {
        3
    }
}

fn options(input: &str) -> SpeakOptions {
    SpeakOptions { input: input.to_owned(), ..SpeakOptions::default() }
}

fn open(options: SpeakOptions) -> Result<Box<dyn Session>, OperationError> {
    let voices = Voices(Arc::new(Letters(["ann".into(), "bob".into()])));
    voices.open(0, &OperationOptions::Speak(options))
}

/// The outputs of each part of the session.
fn parts(session: &mut dyn Session) -> Vec<Vec<OperationOutput>> {
    let mut parts = Vec::new();
    session.segment(true, &mut Vec::new()).unwrap();
    loop {
        let mut out = Vec::new();
        let more = session.continue_segment(&mut out).unwrap();
        parts.push(out);
        if !more {
            return parts;
        }
    }
}

/// The phonemes of each part, with `_` for a sample of silence.
fn heard(session: &mut dyn Session, voice: u32) -> Vec<String> {
    let letter = |sample: &i16| match (f32::from(*sample) * 256.0 / 32_767.0).round() as u32 {
        0 => '_',
        code => char::from_u32(code - voice).unwrap(),
    };
    let text = |output: &OperationOutput| match output {
        OperationOutput::Audio(Pcm::I16(samples)) => samples.iter().map(letter).collect::<String>(),
        other => panic!("{other:?}"),
    };
    parts(session).iter().map(|part| part.iter().map(text).collect()).collect()
}

#[test]
fn a_text_is_spoken_sentence_by_sentence() {
    let mut session = open(options("Dr. Who, come. Stay!\n\nmute. Go")).unwrap();
    assert_eq!((session.rate(), session.max_samples()), (Some(8_000), 0));
    let spoken = ["Dr Who, come.___", "Stay!___", "Go"];
    assert_eq!(heard(session.as_mut(), 0), spoken);
    session.reset();
    assert_eq!(heard(session.as_mut(), 0), spoken, "a reset begins anew");
    let slow = SpeakOptions { voice: Some("bob".into()), speed: Some(0.5), ..options("ab. C") };
    assert_eq!(heard(open(slow).unwrap().as_mut(), 1), ["aabb..______", "CC"]);
    // Nothing is left to be said, and that is no fault.
    assert!(parts(open(options("mute. mute?")).unwrap().as_mut()).concat().is_empty());
    assert_eq!(heard(open(options("ab! mute")).unwrap().as_mut(), 0), ["ab!___", ""]);
}

#[test]
fn options_are_refused_by_their_field() {
    let refused = |options| match open(options).err() {
        Some(OperationError::InvalidField { field, reason }) => (field, reason),
        other => panic!("{other:?}"),
    };
    let of = |field: &str, reason: &str| (field.to_owned(), reason.to_owned());
    for nothing in ["", " \n", "?!.", "\u{1f}\u{0}"] {
        assert_eq!(refused(options(nothing)), of("input", "it has no letter and no digit"));
    }
    let long = "\u{e9}".repeat(MAX_SPEECH_CHARS);
    assert!(open(options(&long)).is_ok());
    let limit = of("input", "it has 4097 characters, the limit is 4096");
    assert_eq!(refused(options(&(long + "a"))), limit);
    let voice = SpeakOptions { voice: Some("alloy".into()), ..options("a") };
    assert_eq!(refused(voice), of("voice", "\"alloy\", it must be one of ann, bob"));
    for speed in [0.2, 4.1, f32::NAN, f32::INFINITY, -1.0] {
        let (field, reason) = refused(SpeakOptions { speed: Some(speed), ..options("a") });
        assert_eq!((field.as_str(), reason), ("speed", format!("{speed}, it must be 0.25 to 4")));
    }
    let voices = Voices(Arc::new(Letters(["ann".into(), "bob".into()])));
    let field = |rate, options: &OperationOptions| match voices.open(rate, options).err() {
        Some(OperationError::InvalidField { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(field(0, &OperationOptions::Default), "options");
    assert_eq!(field(16_000, &OperationOptions::Speak(options("a"))), "sample_rate");
}

#[test]
fn long_sentences_are_spoken_in_pieces() {
    let cut = |clauses: &[String], first| {
        let pieces = pieces(clauses, first);
        assert!(
            pieces
                .iter()
                .all(|piece| piece.phonemes.chars().count() <= MAX_PIECE && !piece.phonemes.is_empty())
        );
        let ends: Vec<bool> = pieces.iter().map(|piece| piece.ends_sentence).collect();
        assert!(ends.iter().rev().enumerate().all(|(at, ends)| *ends == (at == 0)), "{ends:?}");
        pieces.into_iter().map(|piece| piece.phonemes).collect::<Vec<_>>()
    };
    let clause = |len: usize| "ə".repeat(len);
    let lens = |pieces: Vec<String>| pieces.iter().map(|piece| piece.chars().count()).collect::<Vec<_>>();
    assert_eq!(cut(&["ab,".into(), "c.".into()], FIRST_PIECE), ["ab, c."]);
    // The first piece is short where a clause ends there.
    let three = [clause(60), clause(60), clause(60)];
    assert_eq!(lens(cut(&three, FIRST_PIECE)), [60, 121]);
    assert_eq!(lens(cut(&three, MAX_PIECE)), [182]);
    assert_eq!(lens(cut(&[clause(150), clause(5)], FIRST_PIECE)), [150, 5]);
    // A clause is cut at its last space, or anywhere.
    assert_eq!(lens(cut(&[clause(4096)], MAX_PIECE)), [vec![400; 10], vec![96]].concat());
    assert_eq!(lens(cut(&[clause(300) + " " + &clause(300)], MAX_PIECE)), [300, 300]);
    assert!(cut(&[], MAX_PIECE).is_empty());
}

#[test]
fn a_long_piece_is_sent_in_frames() {
    let word = SpeakOptions { speed: Some(0.25), ..options(&"a".repeat(4096)) };
    let parts = parts(open(word).unwrap().as_mut());
    assert_eq!(parts.len(), 11);
    let voices = Voices(Arc::new(Loud));
    let mut session = voices.open(0, &OperationOptions::Speak(options("a"))).unwrap();
    let mut out = Vec::new();
    session.continue_segment(&mut out).unwrap();
    let frame = |len| OperationOutput::Audio(Pcm::I16(vec![32_767; len]));
    assert_eq!(out, [frame(MAX_FRAME_SAMPLES), frame(1)]);
}

/// Speaks louder than full scale.
struct Loud;

impl Network for Loud {
    fn rate(&self) -> u32 {
        8_000
    }

    fn names(&self) -> &[String] {
        &[]
    }

    fn phonemes(&self, clause: &Clause, _: usize) -> Result<String, Error> {
        Ok(clause.text.clone())
    }

    fn speak(&self, _: &str, _: usize, _: f32) -> Result<Vec<f32>, Error> {
        Ok(vec![1.5; MAX_FRAME_SAMPLES + 1])
    }

    fn pause(&self) -> usize {
        0
    }
}

/// A change of settings, and what it is refused with.
type Change = (fn(&mut serde_json::Value), &'static str);

#[test]
fn damaged_settings_are_refused_with_their_fault() {
    let dir = tempfile::tempdir().unwrap();
    let network = dir.path().join("voice.onnx");
    std::fs::write(&network, "not opened").unwrap();
    let refused = |change: fn(&mut serde_json::Value)| {
        let mut settings = serde_json::json!({
            "audio": {"sample_rate": 22050},
            "espeak": {"voice": "en-us"},
            "inference": {"noise_scale": 0.667, "length_scale": 1, "noise_w": 0.8},
            "phoneme_type": "espeak",
            "num_speakers": 1,
            "phoneme_id_map": {"_": [0], "^": [1], "$": [2], "a": [14]},
        });
        change(&mut settings);
        std::fs::write(piper::settings(&network), settings.to_string()).unwrap();
        Piper::load(&network, 1).err().unwrap().to_string()
    };
    let whole = refused(|_| {});
    assert!(whole.starts_with(network.to_str().unwrap()) && !whole.contains(".json"), "{whole}");
    let faults: [Change; 8] = [
        (
            |settings| settings["audio"]["sample_rate"] = 0.into(),
            "sample_rate is 0, it must be 8000 to 48000",
        ),
        (|settings| settings["espeak"]["voice"] = "-w x".into(), "\"-w x\" is not the name of a voice"),
        (|settings| settings["inference"]["noise_w"] = (-1).into(), "noise_w: -1.0"),
        (|settings| settings["inference"]["length_scale"] = 0.into(), "length_scale of 0.1 at least"),
        (|settings| settings["phoneme_type"] = "text".into(), "phoneme_type is \"text\""),
        (|settings| settings["phoneme_id_map"] = serde_json::json!({}), "phoneme_id_map has no '^'"),
        (|settings| settings["phoneme_id_map"]["a"] = vec![1; 9].into(), "\"a\" has 9 numbers, at most 8"),
        (|settings| settings["num_speakers"] = 2.into(), "speaker_id_map is empty"),
    ];
    for (change, fault) in faults {
        let refused = refused(change);
        assert!(refused.contains("voice.onnx.json") && refused.contains(fault), "{refused}");
    }
    std::fs::write(piper::settings(&network), "{").unwrap();
    assert!(Piper::load(&network, 1).err().unwrap().to_string().contains("EOF"));
    std::fs::write(piper::settings(&network), vec![b' '; (1 << 20) + 1]).unwrap();
    assert!(Piper::load(&network, 1).err().unwrap().to_string().contains("more than 1048576 bytes"));
}

/// Texts, and the phonemes of their sentences by Piper (piper-phonemize 1.1.0 with espeak-ng 1.51, and
/// piper-tts 1.8.0 with 1.52).
const OF_PIPER: [(&str, &[&str]); 9] = [
    ("Hello, world! How are you today?", &["həlˈoʊ, wˈɜːld!", "hˌaʊ ɑːɹ juː tədˈeɪ?"]),
    (
        "It cost $3.50, or was it 3.5?",
        &["ɪt kˈɔst dˈɑːlɚ θɹˈiː pɔɪnt fˈaɪv zˈiəɹoʊ, ɔːɹ wʌz ɪt θɹˈiː pɔɪnt fˈaɪv?"],
    ),
    ("A dash - here -- and there — ok.", &["ɐ dˈæʃ hˈɪɹ ænd ðˈɛɹ; ˌoʊkˈeɪ."]),
    (
        "I'm sure it's John's, e.g. the red one, i.e. this.",
        &["aɪm ʃˈʊɹ ɪts dʒˈɑːnz, fˌɔːɹɛɡzˈæmpəl ðə ɹˈɛd wˌʌn, ˌaɪˈiː ðˈɪs."],
    ),
    ("“Smart quotes,” she said, ‘fine’.", &["smˈɑːɹt kwˈoʊts, ʃiː sˈɛd, fˈaɪn."]),
    ("\"Stop!\" he cried.", &["stˈɑːp!", "hiː kɹˈaɪd."]),
    ("He left (why?). She stayed.", &["hiː lˈɛft wˈaɪ?", "ʃiː stˈeɪd."]),
    ("C'est la vie, mon ami.", &["seɪ læ vˈiː, mˈɑːn ˈɑːmi."]),
    ("a: b, c; d", &["ˈeɪ: bˈiː, sˈiː; dˈiː"]),
];

#[test]
fn phonemes_are_those_of_piper() {
    // A machine without the program cannot say.
    if let Err(missing) = available() {
        eprintln!("not checked: {missing}");
        return;
    }
    let english = espeak::Phonemizer::new("en-us", false).unwrap();
    let phonemes = |text: &str| -> Vec<String> {
        let clause = |clause: &Clause| english.phonemes(clause).unwrap() + clause.stop.mark();
        let sentence = |clauses: &Vec<Clause>| clauses.iter().map(clause).collect::<Vec<_>>().join(" ");
        sentences(text).iter().map(sentence).collect()
    };
    for (text, expected) in OF_PIPER {
        assert_eq!(phonemes(text), expected, "{text}");
    }
    // A title ends no sentence, unlike there.
    assert_eq!(phonemes("Dr. Smith."), ["dˈɑːktɚ smˈɪθ."]);
    // Texts without words make no process fail.
    for text in
        ["a\u{1}2b", "x [[h@l'oU]] y", "<speak>1</speak>", "你好 b", "🙂 c", "-q d", &"a".repeat(4096)]
    {
        assert!(!phonemes(text).concat().is_empty(), "{text}");
    }
    let unknown = espeak::Phonemizer::new("xx-none", false).unwrap();
    let error = unknown.phonemes(&sentences("a")[0][0]).unwrap_err().to_string();
    assert!(error.starts_with("espeak-ng: it ended with"), "{error}");
}
