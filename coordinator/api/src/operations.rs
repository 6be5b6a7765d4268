//! The common part of sessions of operations ([`realtime`](super::realtime)) and of calls with a whole
//! recording (`audio`): query fields, encoding of samples, the limit of sessions, and errors.

use super::answer::{BACKEND_HEADER, WORKER_HEADER};
use super::error::ApiError;
use super::languages;
use axum::extract::Query as UrlQuery;
use axum::http::{HeaderMap, HeaderValue, Uri};
use dispatch::Unopened;
use dispatch::quota::{Exceeded, Limit, Of};
use parking_lot::Mutex;
use proto::ids::{ModelId, NodeId};
use proto::operation::{
    DiarizationOptions, MAX_WAKEWORDS, OpenedOperation, Operation, OperationError, OperationOptions, Pcm,
    SpeechOptions, TranscribeOptions, TurnOptions, WakewordOptions,
};
use router::balancer::SessionRefusal;
use std::collections::HashMap;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// Largest duration of an option, as at the workers.
const MAX_OPTION_MS: u32 = 60_000;
/// Most speakers of an option, as at the workers.
const MAX_SPEAKERS: u32 = 100;
/// Valid thresholds of a speaker's cosine.
pub const COSINE_RULE: &str = "a number from -1 to 1";
/// `retry-after` if a tenant has too many sessions.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Encoding of samples of one channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// 16 bit integers, signed, little-endian.
    S16le,
    /// 32 bit floats, little-endian; full scale is 1.
    F32le,
}

impl Encoding {
    pub fn name(self) -> &'static str {
        match self {
            Self::S16le => "pcm_s16le",
            Self::F32le => "pcm_f32le",
        }
    }

    /// Bytes of one sample.
    pub fn width(self) -> usize {
        match self {
            Self::S16le => size_of::<i16>(),
            Self::F32le => size_of::<f32>(),
        }
    }

    /// Decodes samples.
    pub fn decode(self, bytes: &[u8]) -> Result<Pcm, ApiError> {
        let torn = || {
            let (len, width) = (bytes.len(), self.width());
            ApiError::field("audio", format!("{len} bytes are no whole number of samples of {width}"))
        };
        match self {
            Self::S16le => {
                let (samples, rest) = bytes.as_chunks();
                let samples = samples.iter().map(|sample| i16::from_le_bytes(*sample)).collect();
                if rest.is_empty() { Ok(Pcm::I16(samples)) } else { Err(torn()) }
            }
            Self::F32le => {
                let (samples, rest) = bytes.as_chunks();
                let samples: Vec<f32> = samples.iter().map(|sample| f32::from_le_bytes(*sample)).collect();
                if let Some(at) = samples.iter().position(|sample| !sample.is_finite()) {
                    return Err(ApiError::field("audio", format!("sample {at} is not finite")));
                }
                if rest.is_empty() { Ok(Pcm::F32(samples)) } else { Err(torn()) }
            }
        }
    }
}

/// The fields of a URL's query. Unknown fields are ignored.
#[derive(Debug)]
pub struct Query(HashMap<String, String>);

impl Query {
    /// Parses the query of `uri`.
    pub fn read(uri: &Uri) -> Result<Self, ApiError> {
        let UrlQuery(pairs) = UrlQuery::<Vec<(String, String)>>::try_from_uri(uri)
            .map_err(|_| ApiError::field("query", "is not NAME=VALUE&NAME=VALUE"))?;
        let mut fields = HashMap::with_capacity(pairs.len());
        for (name, value) in pairs {
            if fields.contains_key(&name) {
                return Err(ApiError::field(name, "is given twice"));
            }
            fields.insert(name, value);
        }
        Ok(Self(fields))
    }

    /// A field that parses and that `accepts` allows. `rule` describes the valid values.
    fn get<T: FromStr>(
        &self,
        name: &'static str,
        rule: &'static str,
        accepts: impl FnOnce(&T) -> bool,
    ) -> Result<Option<T>, ApiError> {
        let Some(text) = self.0.get(name) else { return Ok(None) };
        let shown = || text.chars().take(64).collect::<String>();
        let wrong = || ApiError::field(name, format!("{:?} is not {rule}", shown()));
        text.parse().ok().filter(accepts).map(Some).ok_or_else(wrong)
    }

    fn share(&self, name: &'static str) -> Result<Option<f32>, ApiError> {
        self.get(name, "a number from 0 to 1", |share| (0.0..=1.0).contains(share))
    }

    fn millis(&self, name: &'static str) -> Result<Option<u32>, ApiError> {
        self.get(name, "a whole number from 0 to 60000", |ms| *ms <= MAX_OPTION_MS)
    }

    fn flag(&self, name: &'static str) -> Result<bool, ApiError> {
        Ok(self.get(name, "true or false", |_: &bool| true)?.unwrap_or(false))
    }

    fn windows(&self) -> Result<bool, ApiError> {
        self.flag("probabilities")
    }

    /// The code of `language`.
    fn language(&self) -> Result<Option<String>, ApiError> {
        let rule = "a language code or English name, such as en or english";
        let named: Option<String> =
            self.get("language", rule, |named: &String| languages::code(named).is_some())?;
        Ok(named.and_then(|named| languages::code(&named)).map(str::to_owned))
    }

    fn speakers(&self, name: &'static str) -> Result<Option<u32>, ApiError> {
        self.get(name, "a whole number from 1 to 100", |count| (1..=MAX_SPEAKERS).contains(count))
    }

    /// Whether the response is an RTTM file, for `response_format`.
    pub fn rttm(&self) -> Result<bool, ApiError> {
        let format: Option<String> = self.get("response_format", "json or rttm", |format: &String| {
            ["json", "rttm"].contains(&&**format)
        })?;
        Ok(format.as_deref() == Some("rttm"))
    }

    /// Names between commas.
    fn words(&self) -> Result<Vec<String>, ApiError> {
        let Some(text) = self.0.get("words") else { return Ok(Vec::new()) };
        let words: Vec<String> = text.split(',').map(|word| word.trim().to_owned()).collect();
        match words.len() <= MAX_WAKEWORDS && words.iter().all(|word| !word.is_empty()) {
            true => Ok(words),
            false => {
                Err(ApiError::field("words", format!("is not 1 to {MAX_WAKEWORDS} words between commas")))
            }
        }
    }

    /// `threshold` of a speaker's cosine; `None` is the model's.
    pub fn cosine(&self) -> Result<Option<f32>, ApiError> {
        self.get("threshold", COSINE_RULE, is_cosine)
    }

    /// `model`; `None` if absent.
    pub fn model(&self) -> Result<Option<ModelId>, ApiError> {
        let named = self.0.get("model");
        let id =
            |text: &String| ModelId::new(text.as_str()).map_err(|error| ApiError::ModelNotFound(error.text));
        named.map(id).transpose()
    }

    /// `backend`; `None` if absent.
    pub fn backend(&self) -> Option<String> {
        self.0.get("backend").cloned()
    }

    /// `sample_rate`, by default 16,000.
    pub fn sample_rate(&self) -> Result<u32, ApiError> {
        let rate = self.get("sample_rate", "a whole number above 0", |rate| *rate > 0)?;
        Ok(rate.unwrap_or(16_000))
    }

    /// `encoding`, by default 16 bit integers.
    pub fn encoding(&self) -> Result<Encoding, ApiError> {
        let all = [Encoding::S16le, Encoding::F32le];
        let Some(text) = self.0.get("encoding") else { return Ok(Encoding::S16le) };
        let shown = || text.chars().take(64).collect::<String>();
        let wrong = || ApiError::field("encoding", format!("{:?} is not pcm_s16le or pcm_f32le", shown()));
        all.into_iter().find(|encoding| encoding.name() == text).ok_or_else(wrong)
    }

    /// The options of an operation.
    pub fn options(&self, operation: Operation) -> Result<OperationOptions, ApiError> {
        match operation {
            Operation::Vad => {
                let options = SpeechOptions {
                    threshold: self.share("threshold")?,
                    end_threshold: self.share("end_threshold")?,
                    min_silence_ms: self.millis("min_silence_ms")?,
                    pad_ms: self.millis("pad_ms")?,
                    windows: self.windows()?,
                };
                match (options.threshold, options.end_threshold) {
                    (Some(threshold), Some(end)) if end > threshold => {
                        let rule = format!("{end} is above the threshold {threshold}");
                        Err(ApiError::field("end_threshold", rule))
                    }
                    _ if options == SpeechOptions::default() => Ok(OperationOptions::Default),
                    _ => Ok(OperationOptions::Speech(options)),
                }
            }
            Operation::TurnDetection => Ok(match self.share("threshold")? {
                None => OperationOptions::Default,
                threshold => OperationOptions::Turn(TurnOptions { threshold }),
            }),
            Operation::Wakeword => {
                let options = WakewordOptions {
                    threshold: self.share("threshold")?,
                    words: self.words()?,
                    debounce_ms: self.millis("debounce_ms")?,
                    windows: self.windows()?,
                };
                Ok(match options == WakewordOptions::default() {
                    true => OperationOptions::Default,
                    false => OperationOptions::Wakeword(options),
                })
            }
            Operation::Diarization => {
                let options = DiarizationOptions {
                    num_speakers: self.speakers("num_speakers")?,
                    min_speakers: self.speakers("min_speakers")?,
                    max_speakers: self.speakers("max_speakers")?,
                    threshold: self.get("threshold", "a number from 0 to 2", |distance| {
                        (0.0..=2.0).contains(distance)
                    })?,
                };
                Ok(match options == DiarizationOptions::default() {
                    true => OperationOptions::Default,
                    false => OperationOptions::Diarization(options),
                })
            }
            Operation::Asr => {
                let options = TranscribeOptions {
                    language: self.language()?,
                    translate: self.flag("translate")?,
                    prompt: self.0.get("prompt").cloned().unwrap_or_default(),
                    words: self.flag("word_times")?,
                    temperature: self.share("temperature")?.unwrap_or_default(),
                };
                Ok(match options == TranscribeOptions::default() {
                    true => OperationOptions::Default,
                    false => OperationOptions::Transcribe(options),
                })
            }
            Operation::Embed | Operation::Rerank | Operation::Tts | Operation::Speaker => {
                Ok(OperationOptions::Default)
            }
        }
    }
}

pub fn is_cosine(threshold: &f32) -> bool {
    (-1.0..=1.0).contains(threshold)
}

/// Counts the open sessions of each tenant.
#[derive(Debug)]
pub struct Sessions {
    /// Most sessions of one tenant.
    limit: u32,
    open: Mutex<HashMap<Arc<str>, u32>>,
}

/// An open session, counted until this is dropped.
#[derive(Debug)]
pub struct Slot {
    sessions: Arc<Sessions>,
    tenant: Arc<str>,
}

impl Sessions {
    pub fn new(limit: u32) -> Arc<Self> {
        Arc::new(Self { limit, open: Mutex::default() })
    }

    /// Opens a session, if its tenant is below the limit.
    pub fn enter(self: &Arc<Self>, tenant: &Arc<str>) -> Result<Slot, Exceeded> {
        let mut all = self.open.lock();
        let open = all.entry(Arc::clone(tenant)).or_default();
        if *open >= self.limit {
            let (limit, allowed) = (Limit::Sessions, self.limit.into());
            return Err(Exceeded { limit, of: Of::Tenant, allowed, retry_after: RETRY_AFTER });
        }
        *open += 1;
        Ok(Slot { sessions: Arc::clone(self), tenant: Arc::clone(tenant) })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut all = self.sessions.open.lock();
        if let Some(open) = all.get_mut(&self.tenant) {
            *open -= 1;
            if *open == 0 {
                all.remove(&self.tenant);
            }
        }
    }
}

/// The error for a session that could not be opened.
pub fn refused(operation: Operation, model: Option<&ModelId>, why: Unopened) -> ApiError {
    match why {
        Unopened::Nobody(SessionRefusal::Operation) => ApiError::NotOffered { operation },
        Unopened::Nobody(SessionRefusal::Model { models }) => ApiError::NotOfferedWith {
            operation,
            model: model.map(ToString::to_string).unwrap_or_default(),
            offered: models.iter().map(ToString::to_string).collect(),
        },
        Unopened::Nobody(SessionRefusal::Backend { requested, backends }) => {
            let shown: String = requested.chars().take(64).collect();
            let backends = backends.into_iter().collect::<Vec<_>>().join(", ");
            ApiError::field("backend", format!("{shown:?} is not offered for {operation}, only {backends}"))
        }
        Unopened::Nobody(SessionRefusal::Away | SessionRefusal::Declined) => {
            ApiError::OperationAway { operation }
        }
        Unopened::Said(error) => failed(operation, error),
        Unopened::Lost => ApiError::WorkerLost,
    }
}

/// The error for a worker's error.
pub fn failed(operation: Operation, error: OperationError) -> ApiError {
    match error {
        OperationError::InvalidField { field, reason } => ApiError::InvalidField { field, reason },
        OperationError::TooManySessions { .. } => ApiError::QueueFull { retry_after: RETRY_AFTER },
        OperationError::NotServed { .. }
        | OperationError::ModelNotFound { .. }
        | OperationError::Draining => ApiError::OperationAway { operation },
        OperationError::Idle { .. } => ApiError::DeadlineExceeded,
        OperationError::TooLong { .. } => ApiError::field("audio", error.to_string()),
        OperationError::Internal => ApiError::Internal,
        OperationError::NotFinite => ApiError::NotFinite,
    }
}

/// Headers that name the worker and the backend of a session.
pub fn session_headers(worker: &NodeId, opened: &OpenedOperation) -> HeaderMap {
    // By their types, names of workers have only characters that headers allow.
    let worker = HeaderValue::from_str(worker.as_str()).map(|worker| (WORKER_HEADER, worker));
    let backend = HeaderValue::from_str(&opened.backend).map(|backend| (BACKEND_HEADER, backend));
    worker.into_iter().chain(backend).collect()
}

/// Samples as seconds, for responses.
pub fn seconds(samples: u64, sample_rate: u32) -> f64 {
    samples as f64 / f64::from(sample_rate.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(text: &str) -> Result<Query, ApiError> {
        Query::read(&format!("/v1/realtime/vad{text}").parse().unwrap())
    }

    fn field(result: Result<impl std::fmt::Debug, ApiError>) -> String {
        match result {
            Err(ApiError::InvalidField { field, .. }) => field,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn query_fields_are_parsed_or_refused_by_name() {
        let defaults = query("").unwrap();
        assert_eq!(defaults.model(), Ok(None));
        assert_eq!((defaults.sample_rate(), defaults.encoding()), (Ok(16_000), Ok(Encoding::S16le)));
        assert_eq!(defaults.options(Operation::Vad), Ok(OperationOptions::Default));
        assert_eq!(defaults.options(Operation::TurnDetection), Ok(OperationOptions::Default));
        let all = "?model=m&sample_rate=8000&encoding=pcm_f32le&threshold=0.5&end_threshold=0.25&min_silence_ms=60000\
                   &pad_ms=0&probabilities=true&backend=onnx&unknown=1";
        let all = query(all).unwrap();
        assert_eq!(all.model().unwrap().unwrap().as_str(), "m");
        assert_eq!((all.backend().as_deref(), defaults.backend()), (Some("onnx"), None));
        assert_eq!((all.sample_rate(), all.encoding()), (Ok(8_000), Ok(Encoding::F32le)));
        let options = SpeechOptions {
            threshold: Some(0.5),
            end_threshold: Some(0.25),
            min_silence_ms: Some(60_000),
            pad_ms: Some(0),
            windows: true,
        };
        assert_eq!(all.options(Operation::Vad), Ok(OperationOptions::Speech(options)));
        assert_eq!(defaults.options(Operation::Wakeword), Ok(OperationOptions::Default));
        let words = query("?words=alexa,%20timer&threshold=0.4&debounce_ms=0&probabilities=true").unwrap();
        let options = WakewordOptions {
            threshold: Some(0.4),
            words: vec!["alexa".into(), "timer".into()],
            debounce_ms: Some(0),
            windows: true,
        };
        assert_eq!(words.options(Operation::Wakeword), Ok(OperationOptions::Wakeword(options)));
        for (text, name) in
            [("?words=", "words"), ("?words=a,,b", "words"), ("?debounce_ms=60001", "debounce_ms")]
        {
            assert_eq!(field(query(text).unwrap().options(Operation::Wakeword)), name, "{text}");
        }
        let speakers = query("?num_speakers=2&threshold=1.5&response_format=rttm").unwrap();
        let options = DiarizationOptions {
            num_speakers: Some(2),
            threshold: Some(1.5),
            ..DiarizationOptions::default()
        };
        assert_eq!(speakers.options(Operation::Diarization), Ok(OperationOptions::Diarization(options)));
        assert_eq!((speakers.rttm(), defaults.rttm()), (Ok(true), Ok(false)));
        assert_eq!(defaults.options(Operation::Diarization), Ok(OperationOptions::Default));
        for (text, name) in [
            ("?num_speakers=0", "num_speakers"),
            ("?min_speakers=101", "min_speakers"),
            ("?max_speakers=two", "max_speakers"),
            ("?threshold=2.1", "threshold"),
        ] {
            assert_eq!(field(query(text).unwrap().options(Operation::Diarization)), name, "{text}");
        }
        let spoken = query("?language=German&prompt=So.&word_times=true&temperature=0.5").unwrap();
        let options = TranscribeOptions {
            language: Some("de".into()),
            translate: false,
            prompt: "So.".into(),
            words: true,
            temperature: 0.5,
        };
        assert_eq!(spoken.options(Operation::Asr), Ok(OperationOptions::Transcribe(options)));
        assert_eq!(defaults.options(Operation::Asr), Ok(OperationOptions::Default));
        for (text, name) in [
            ("?language=klingon", "language"),
            ("?translate=1", "translate"),
            ("?word_times=yes", "word_times"),
            ("?temperature=1.5", "temperature"),
        ] {
            assert_eq!(field(query(text).unwrap().options(Operation::Asr)), name, "{text}");
        }
        assert_eq!(field(query("?response_format=xml").unwrap().rttm()), "response_format");
        let many = format!("?words={}", vec!["a"; MAX_WAKEWORDS + 1].join(","));
        assert_eq!(field(query(&many).unwrap().options(Operation::Wakeword)), "words");
        assert_eq!(query("?threshold=-0.5").unwrap().cosine(), Ok(Some(-0.5)));
        assert_eq!(field(query("?threshold=1.5").unwrap().cosine()), "threshold");
        let turn = OperationOptions::Turn(TurnOptions { threshold: Some(0.5) });
        assert_eq!(all.options(Operation::TurnDetection), Ok(turn));
        for (text, name) in [
            ("?threshold=1.01", "threshold"),
            ("?threshold=NaN", "threshold"),
            ("?end_threshold=-0.1", "end_threshold"),
            ("?threshold=0.3&end_threshold=0.4", "end_threshold"),
            ("?min_silence_ms=60001", "min_silence_ms"),
            ("?pad_ms=1.5", "pad_ms"),
            ("?probabilities=yes", "probabilities"),
        ] {
            assert_eq!(field(query(text).unwrap().options(Operation::Vad)), name, "{text}");
        }
        assert_eq!(field(query("?sample_rate=0").unwrap().sample_rate()), "sample_rate");
        assert_eq!(field(query("?sample_rate=-1").unwrap().sample_rate()), "sample_rate");
        assert_eq!(field(query("?encoding=mp3").unwrap().encoding()), "encoding");
        assert_eq!(field(query("?model=a&model=b")), "model");
        let escaped = query("?model=..%2F..%2Fetc%2Fpasswd").unwrap().model();
        assert!(matches!(escaped, Err(ApiError::ModelNotFound(_))), "{escaped:?}");
    }

    #[test]
    fn only_whole_and_finite_samples_are_accepted() {
        let pcm = Encoding::S16le.decode(&[0, 0x80, 0xff, 0x7f, 1, 0]);
        assert_eq!(pcm, Ok(Pcm::I16(vec![-32_768, 32_767, 1])));
        let bytes: Vec<u8> = [0.5f32, -1.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(Encoding::F32le.decode(&bytes), Ok(Pcm::F32(vec![0.5, -1.0])));
        assert_eq!(Encoding::S16le.decode(&[]), Ok(Pcm::I16(vec![])));
        assert_eq!(field(Encoding::S16le.decode(&[1, 2, 3])), "audio");
        assert_eq!(field(Encoding::F32le.decode(&bytes[..7])), "audio");
        let wrong = Encoding::F32le.decode(&f32::NAN.to_le_bytes()).unwrap_err();
        assert!(wrong.to_string().contains("sample 0"), "{wrong}");
    }

    #[test]
    fn the_session_limit_holds_for_each_tenant() {
        let sessions = Sessions::new(2);
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        let first = sessions.enter(&a).unwrap();
        let _second = sessions.enter(&a).unwrap();
        let refused = sessions.enter(&a).unwrap_err();
        assert_eq!((refused.limit, refused.of, refused.allowed), (Limit::Sessions, Of::Tenant, 2));
        let other = sessions.enter(&b).unwrap();
        drop(first);
        let _third = sessions.enter(&a).unwrap();
        assert!(sessions.enter(&a).is_err());
        drop(other);
        assert_eq!(sessions.open.lock().len(), 1, "who has none is not remembered");
    }

    #[test]
    fn a_refusal_names_the_operation_and_the_models_that_serve_it() {
        let model = |id: &str| ModelId::new(id).unwrap();
        let vad = Operation::Vad;
        let response_of = |model: Option<&ModelId>, why| {
            let error = refused(vad, model, why);
            (error.status().as_u16(), error.code(), error.to_string())
        };
        let (status, code, text) = response_of(None, Unopened::Nobody(SessionRefusal::Operation));
        assert_eq!((status, code), (503, "no_worker"));
        assert!(text.contains("operation vad") && text.contains("bundle"), "{text}");
        let models = vec![model("silero"), model("other")];
        let (status, code, text) =
            response_of(Some(&model("mine")), Unopened::Nobody(SessionRefusal::Model { models }));
        assert_eq!((status, code), (404, "model_not_found"));
        assert!(
            text.contains("operation vad") && text.contains("\"mine\"") && text.contains("silero, other")
        );
        let (requested, backends) = ("n".repeat(99), ["kernels".to_owned(), "onnx".to_owned()].into());
        let (status, code, text) =
            response_of(None, Unopened::Nobody(SessionRefusal::Backend { requested, backends }));
        assert_eq!((status, code), (400, "invalid_field"));
        let expected = format!("{:?} is not offered for vad, only kernels, onnx", "n".repeat(64));
        assert!(text.contains("backend") && text.contains(&expected), "{text}");
        let (status, code, text) = response_of(None, Unopened::Nobody(SessionRefusal::Away));
        assert_eq!((status, code), (503, "no_worker"));
        assert!(text.contains("operation vad"), "{text}");
        let code_of = |error| refused(vad, None, Unopened::Said(error)).code();
        assert_eq!(code_of(OperationError::TooManySessions { limit: 3 }), "queue_full");
        assert_eq!(code_of(OperationError::Draining), "no_worker");
        let field = OperationError::InvalidField { field: "sample_rate".into(), reason: "44100".into() };
        assert_eq!(code_of(field), "invalid_field");
        assert_eq!(response_of(None, Unopened::Lost).1, "worker_lost");
    }
}
