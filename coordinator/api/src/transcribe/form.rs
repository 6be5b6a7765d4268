//! Parses the form with a recording.

use super::Task;
use crate::error::ApiError;
use crate::languages;
use crate::limits::{MAX_FORM_FIELDS, MAX_FORM_TEXT, MAX_UPLOAD};
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use futures::stream::iter;
use multer::Multipart;
use proto::ids::ModelId;
use proto::operation::TranscribeOptions;
use std::collections::HashSet;
use std::convert::Infallible;

/// The format of the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Json,
    Text,
    /// With segments, words or both.
    Verbose {
        segments: bool,
        words: bool,
    },
    Srt,
    Vtt,
}

#[derive(Debug, PartialEq)]
pub(super) struct Form {
    pub(super) file: Bytes,
    /// `None`: any offered model.
    pub(super) model: Option<ModelId>,
    pub(super) backend: Option<String>,
    pub(super) options: TranscribeOptions,
    pub(super) format: Format,
    /// Whether the answer is a stream of events.
    pub(super) stream: bool,
    /// Whether several workers transcribe parts of the recording.
    pub(super) parts: bool,
}

/// The boundary between the fields of a multipart body.
pub(super) fn boundary(headers: &HeaderMap) -> Result<String, ApiError> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let rule = "the body is a form (multipart/form-data) with a boundary, and the recording its field file";
    multer::parse_boundary(kind).map_err(|_| ApiError::field("content-type", rule))
}

pub(super) async fn read(body: Bytes, boundary: String, task: Task) -> Result<Form, ApiError> {
    let mut form = Multipart::new(iter([Ok::<_, Infallible>(body)]), boundary);
    let torn = |_| ApiError::field("body", "is cut off, or no form");
    let mut file = None;
    let (mut model, mut backend) = (None, None);
    let (mut options, mut format) = (TranscribeOptions::default(), Format::Json);
    options.translate = task == Task::Translate;
    let (mut segments, mut words, mut stream, mut parts) = (false, false, false, false);
    let mut seen = HashSet::new();
    for fields in 0.. {
        let Some(field) = form.next_field().await.map_err(torn)? else { break };
        if fields == MAX_FORM_FIELDS {
            return Err(ApiError::field("body", format!("has more than {MAX_FORM_FIELDS} fields")));
        }
        let name = field.name().unwrap_or_default().chars().take(64).collect::<String>();
        let bytes = field.bytes().await.map_err(torn)?;
        let repeats = name == "timestamp_granularities[]";
        if !repeats && !seen.insert(name.clone()) {
            return Err(ApiError::field(name, "is given twice"));
        }
        if name == "file" {
            if bytes.len() > MAX_UPLOAD {
                return Err(ApiError::field(
                    name,
                    format!("has {} bytes, the limit is {MAX_UPLOAD}", bytes.len()),
                ));
            }
            file = Some(bytes);
            continue;
        }
        if bytes.len() > MAX_FORM_TEXT {
            return Err(ApiError::field(
                name,
                format!("has {} bytes, the limit is {MAX_FORM_TEXT}", bytes.len()),
            ));
        }
        let wrong = |rule: &str| {
            let shown: String = String::from_utf8_lossy(&bytes).chars().take(64).collect();
            Err(ApiError::field(name.as_str(), format!("{shown:?} {rule}")))
        };
        let Ok(text) = std::str::from_utf8(&bytes) else { return wrong("is not UTF-8") };
        match name.as_str() {
            "model" => {
                model = Some(ModelId::new(text).map_err(|error| ApiError::ModelNotFound(error.text))?);
            }
            "language" if task == Task::Transcribe => match (text, languages::code(text)) {
                ("", _) => {}
                (_, Some(code)) => options.language = Some(code.to_owned()),
                (_, None) => return wrong("is not a language code or English name, such as en or english"),
            },
            "backend" => backend = Some(text.to_owned()),
            "prompt" => options.prompt = text.to_owned(),
            "response_format" => {
                format = match text {
                    "json" => Format::Json,
                    "text" => Format::Text,
                    "verbose_json" => Format::Verbose { segments: true, words: false },
                    "srt" => Format::Srt,
                    "vtt" => Format::Vtt,
                    _ => return wrong("is none of json, text, verbose_json, srt and vtt"),
                };
            }
            "temperature" => match text.trim().parse() {
                Ok(temperature) if (0.0..=1.0).contains(&temperature) => options.temperature = temperature,
                _ => return wrong("is not a number from 0 to 1"),
            },
            "stream" if task == Task::Transcribe => match text.to_ascii_lowercase().as_str() {
                "true" => stream = true,
                "false" => stream = false,
                _ => return wrong("is neither true nor false"),
            },
            "timestamp_granularities[]" => match text {
                "segment" => segments = true,
                "word" => words = true,
                _ => return wrong("is neither segment nor word"),
            },
            "chunking_strategy" if text == "auto" => parts = true,
            "chunking_strategy" => return wrong("is not auto"),
            _ => return Err(ApiError::field(name, "is not a known field")),
        }
    }
    if segments || words {
        if !matches!(format, Format::Verbose { .. }) {
            let rule = "only a response_format of verbose_json has times";
            return Err(ApiError::field("timestamp_granularities[]", rule));
        }
        format = Format::Verbose { segments, words };
        options.words = words;
    }
    if stream && format != Format::Json {
        return Err(ApiError::field("stream", "events have a response_format of json, no other"));
    }
    if stream && parts {
        return Err(ApiError::field("chunking_strategy", "is not for a stream, which is one sequence"));
    }
    let file = file.ok_or_else(|| ApiError::field("file", "is missing: a recording"))?;
    Ok(Form { file, model, backend, options, format, stream, parts })
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::executor::block_on;
    use proptest::prelude::*;

    fn body(fields: &[(&str, &[u8])]) -> Bytes {
        let mut body = Vec::new();
        for (name, value) in fields {
            body.extend(
                format!("--XX\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n").as_bytes(),
            );
            body.extend_from_slice(value);
            body.extend(b"\r\n");
        }
        body.extend(b"--XX--\r\n");
        body.into()
    }

    fn form(task: Task, fields: &[(&str, &str)]) -> Result<Form, ApiError> {
        let mut all: Vec<(&str, &[u8])> = vec![("file", b"RIFF")];
        all.extend(fields.iter().map(|(name, value)| (*name, value.as_bytes())));
        block_on(read(body(&all), "XX".to_owned(), task))
    }

    #[test]
    fn a_form_is_read() {
        let plain = form(Task::Transcribe, &[]).unwrap();
        assert_eq!((plain.file.as_ref(), plain.model, plain.format), (&b"RIFF"[..], None, Format::Json));
        assert_eq!(plain.options, TranscribeOptions::default());
        let fields = [
            ("model", "whisper-base"),
            ("backend", "kernels"),
            ("language", "German"),
            ("prompt", "Käse"),
            ("response_format", "verbose_json"),
            ("temperature", "0.25"),
            ("stream", "false"),
            ("timestamp_granularities[]", "segment"),
            ("timestamp_granularities[]", "word"),
        ];
        let all = form(Task::Transcribe, &fields).unwrap();
        assert_eq!(all.model.unwrap().as_str(), "whisper-base");
        assert_eq!(all.backend.as_deref(), Some("kernels"));
        let options = TranscribeOptions {
            language: Some("de".into()),
            translate: false,
            prompt: "Käse".into(),
            words: true,
            temperature: 0.25,
        };
        assert_eq!((all.options, all.format), (options, Format::Verbose { segments: true, words: true }));
        assert!(form(Task::Translate, &[]).unwrap().options.translate);
    }

    #[test]
    fn unsupported_fields_are_refused_by_name() {
        let long = "x".repeat(MAX_FORM_TEXT + 1);
        for (name, value) in [
            ("temperature", "1.2"),
            ("temperature", "-0.5"),
            ("temperature", "NaN"),
            ("language", "klingon"),
            ("response_format", "xml"),
            ("timestamp_granularities[]", "letter"),
            ("timestamp_granularities[]", "word"),
            ("timestamp_granularities[]", "segment"),
            ("stream", "yes"),
            ("include[]", "logprobs"),
            ("chunking_strategy", "server_vad"),
            ("prompt", long.as_str()),
        ] {
            let refusal = form(Task::Transcribe, &[(name, value)]).unwrap_err();
            assert_eq!(refusal.param(), Some(name), "{name}={value}: {refusal}");
        }
        for (name, value) in [("language", "de"), ("stream", "true")] {
            assert_eq!(form(Task::Translate, &[(name, value)]).unwrap_err().param(), Some(name));
        }
        assert_eq!(form(Task::Transcribe, &[("model", "../x")]).unwrap_err().code(), "model_not_found");
        assert_eq!(
            form(Task::Transcribe, &[("prompt", "a"), ("prompt", "b")]).unwrap_err().param(),
            Some("prompt")
        );
        let both = [("stream", "true"), ("response_format", "text")];
        assert_eq!(form(Task::Transcribe, &both).unwrap_err().param(), Some("stream"));
        let both = [("stream", "true"), ("chunking_strategy", "auto")];
        assert_eq!(form(Task::Transcribe, &both).unwrap_err().param(), Some("chunking_strategy"));
        assert!(form(Task::Translate, &both[1..]).unwrap().parts);
        assert!(form(Task::Transcribe, &[("stream", "True")]).unwrap().stream);
        let many = vec![("timestamp_granularities[]", "segment"); MAX_FORM_FIELDS];
        assert_eq!(form(Task::Transcribe, &many).unwrap_err().param(), Some("body"));
        let missing = block_on(read(body(&[]), "XX".to_owned(), Task::Transcribe)).unwrap_err();
        assert_eq!(missing.param(), Some("file"));
    }

    #[test]
    fn only_multipart_forms_are_accepted() {
        let parse =
            |kind: &str| boundary(&HeaderMap::from_iter([(header::CONTENT_TYPE, kind.parse().unwrap())]));
        assert_eq!(parse("multipart/form-data; boundary=XX").unwrap(), "XX");
        for kind in ["multipart/form-data", "audio/wav", "application/json", ""] {
            assert_eq!(parse(kind).unwrap_err().param(), Some("content-type"), "{kind}");
        }
    }

    proptest! {
        #[test]
        fn whatever_comes_is_read_or_refused(cut in 0usize..400, changes in proptest::collection::vec((0usize..400, any::<u8>()), 0..8)) {
            let good = body(&[("file", b"RIFF"), ("model", b"m"), ("response_format", b"text"), ("prompt", b"so")]);
            let mut bytes = good.to_vec();
            for (at, byte) in changes {
                let at = at % bytes.len();
                bytes[at] = byte;
            }
            bytes.truncate(bytes.len().min(cut.max(1)));
            let _either = block_on(read(bytes.into(), "XX".to_owned(), Task::Transcribe));
        }
    }
}
