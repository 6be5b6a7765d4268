//! The languages of Whisper models: codes of their tokens, and English names.

const LANGUAGES: [(&str, &str); 100] = [
    ("af", "afrikaans"),
    ("am", "amharic"),
    ("ar", "arabic"),
    ("as", "assamese"),
    ("az", "azerbaijani"),
    ("ba", "bashkir"),
    ("be", "belarusian"),
    ("bg", "bulgarian"),
    ("bn", "bengali"),
    ("bo", "tibetan"),
    ("br", "breton"),
    ("bs", "bosnian"),
    ("ca", "catalan"),
    ("cs", "czech"),
    ("cy", "welsh"),
    ("da", "danish"),
    ("de", "german"),
    ("el", "greek"),
    ("en", "english"),
    ("es", "spanish"),
    ("et", "estonian"),
    ("eu", "basque"),
    ("fa", "persian"),
    ("fi", "finnish"),
    ("fo", "faroese"),
    ("fr", "french"),
    ("gl", "galician"),
    ("gu", "gujarati"),
    ("ha", "hausa"),
    ("haw", "hawaiian"),
    ("he", "hebrew"),
    ("hi", "hindi"),
    ("hr", "croatian"),
    ("ht", "haitian creole"),
    ("hu", "hungarian"),
    ("hy", "armenian"),
    ("id", "indonesian"),
    ("is", "icelandic"),
    ("it", "italian"),
    ("ja", "japanese"),
    ("jw", "javanese"),
    ("ka", "georgian"),
    ("kk", "kazakh"),
    ("km", "khmer"),
    ("kn", "kannada"),
    ("ko", "korean"),
    ("la", "latin"),
    ("lb", "luxembourgish"),
    ("ln", "lingala"),
    ("lo", "lao"),
    ("lt", "lithuanian"),
    ("lv", "latvian"),
    ("mg", "malagasy"),
    ("mi", "maori"),
    ("mk", "macedonian"),
    ("ml", "malayalam"),
    ("mn", "mongolian"),
    ("mr", "marathi"),
    ("ms", "malay"),
    ("mt", "maltese"),
    ("my", "myanmar"),
    ("ne", "nepali"),
    ("nl", "dutch"),
    ("nn", "nynorsk"),
    ("no", "norwegian"),
    ("oc", "occitan"),
    ("pa", "punjabi"),
    ("pl", "polish"),
    ("ps", "pashto"),
    ("pt", "portuguese"),
    ("ro", "romanian"),
    ("ru", "russian"),
    ("sa", "sanskrit"),
    ("sd", "sindhi"),
    ("si", "sinhala"),
    ("sk", "slovak"),
    ("sl", "slovenian"),
    ("sn", "shona"),
    ("so", "somali"),
    ("sq", "albanian"),
    ("sr", "serbian"),
    ("su", "sundanese"),
    ("sv", "swedish"),
    ("sw", "swahili"),
    ("ta", "tamil"),
    ("te", "telugu"),
    ("tg", "tajik"),
    ("th", "thai"),
    ("tk", "turkmen"),
    ("tl", "tagalog"),
    ("tr", "turkish"),
    ("tt", "tatar"),
    ("uk", "ukrainian"),
    ("ur", "urdu"),
    ("uz", "uzbek"),
    ("vi", "vietnamese"),
    ("yi", "yiddish"),
    ("yo", "yoruba"),
    ("yue", "cantonese"),
    ("zh", "chinese"),
];

/// The code of a language given by its code or English name.
pub(crate) fn code(named: &str) -> Option<&'static str> {
    let named = named.trim().to_ascii_lowercase();
    LANGUAGES.iter().find(|(code, name)| [*code, *name].contains(&named.as_str())).map(|(code, _)| *code)
}

/// The English name of a language; the code itself if unknown.
pub(crate) fn name(code: &str) -> &str {
    LANGUAGES.iter().find(|(other, _)| *other == code).map_or(code, |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn languages_have_a_code_and_a_name() {
        assert!(LANGUAGES.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert_eq!(
            (code("EN"), code("English"), code("haitian creole")),
            (Some("en"), Some("en"), Some("ht"))
        );
        assert_eq!((code("klingon"), code("")), (None, None));
        assert_eq!((name("de"), name("tlh")), ("german", "tlh"));
    }
}
