//! Requests prepared by the coordinator's code: bodies in, tokens and unit ids out.

use anyhow::{Context, Result, anyhow};
use api::auth::{Keys, salt};
use api::documents::Popularity;
use api::plan::{self, Effort, Kind, Sources};
use dispatch::models::{ModelEntry, Models};
use proto::block::{BlockId, ClusterKey, Scope};
use proto::ids::ModelId;
use proto::served_model::{ModelTask, ServedModel};
use router::routing::predicted_tokens;
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashSet;
use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

/// The tenant of all requests.
pub(crate) const TENANT: &str = "default";

/// A request as seen by routers and workers.
#[derive(Debug, Clone)]
pub(crate) struct Prompt {
    /// The messages' texts, for routers without tokens.
    pub(crate) text: Arc<str>,
    pub(crate) tokens: Arc<[u32]>,
    /// Ids of the full hash units.
    pub(crate) chain: Arc<[BlockId]>,
}

/// One question in both forms.
#[derive(Debug)]
pub(crate) struct Question {
    /// Documents in the order of their rank, as written by a client.
    pub(crate) by_rank: Prompt,
    /// Documents as a field, ordered by the coordinator.
    pub(crate) by_popularity: Prompt,
}

/// All requests of a run.
#[derive(Debug)]
pub(crate) struct Traffic {
    pub(crate) model: ServedModel,
    /// Root of all chains.
    pub(crate) root: BlockId,
    /// Requests in order.
    pub(crate) questions: Vec<Question>,
}

#[derive(Deserialize)]
struct Line {
    by_rank: Value,
    by_popularity: Value,
}

impl Traffic {
    /// Reads at most `max_questions` questions from the output of `bench/rag/traffic.py`, and prepares them
    /// for the model in `gguf` with `layers` layers.
    pub(crate) fn read(path: &Path, gguf: &Path, layers: u32, max_questions: usize) -> Result<Self> {
        let id = ModelId::new("simulated")?;
        let models = Models::open(&[ModelEntry { id: id.clone(), path: gguf.to_owned() }], false)?;
        let offered = models.only().context("one model")?;
        let model = ServedModel {
            id,
            model_digest: [7; 32],
            tokenizer_digest: offered.tokenizer.digest(),
            max_model_len: u32::MAX,
            layers: (0, layers),
            engine: "kvasir".into(),
            hit_tokens: 16,
            numeric_class: "simulated".to_owned(),
            block_tokens: 16,
            task: ModelTask::Generate,
        };
        let key = ClusterKey([3; 32]);
        let root = key.root(Scope {
            salt: &salt(&key, TENANT),
            model_digest: &model.model_digest,
            tokenizer_digest: &model.tokenizer_digest,
            adapter: b"",
        });
        let popularity = Popularity::default();
        let served = |_: &ModelId| Some(model.clone());
        // Without keys every caller is accepted.
        let caller = Keys::new(&[], ClusterKey([3; 32]), None)?.authenticate(&Default::default())?;
        let sources = Sources {
            caller: &caller,
            models: &models,
            served: &served,
            parent: &|_| None,
            seed: 1,
            popularity: &popularity,
            fetched: None,
        };
        let prompt = |body: &Value| -> Result<Prompt> {
            let planned = plan::generation(
                Kind::Chat,
                body.to_string().as_bytes(),
                &sources,
                Effort::Full { counted: false },
            );
            let planned = planned.map_err(|error| anyhow!("{error}"))?;
            let (tokens, _) = planned.prompts.into_iter().next().context("a prompt")?;
            Ok(Prompt {
                text: text(body).into(),
                chain: key.chain(root, &tokens).into(),
                tokens: tokens[..].into(),
            })
        };
        let file = std::fs::File::open(path).with_context(|| format!("{}", path.display()))?;
        let mut questions = Vec::new();
        for line in std::io::BufReader::new(file).lines().take(max_questions) {
            let line: Line = serde_json::from_str(&line?)?;
            questions.push(Question {
                by_rank: prompt(&line.by_rank)?,
                by_popularity: prompt(&line.by_popularity)?,
            });
        }
        Ok(Self { model, root, questions })
    }

    /// Mean prompt length in tokens, as written by clients.
    pub(crate) fn mean_tokens(&self) -> f64 {
        let tokens: usize = self.questions.iter().map(|question| question.by_rank.tokens.len()).sum();
        tokens as f64 / self.questions.len().max(1) as f64
    }
}

/// The messages' texts in order, as used by both other routers.
fn text(body: &Value) -> String {
    let messages = body["messages"].as_array().into_iter().flatten();
    messages.filter_map(|message| message["content"].as_str()).collect::<Vec<_>>().join(" ")
}

/// Prompt tokens that one unbounded cache computes for these prompts, one after the other.
pub(crate) fn computed_once<'a>(prompts: impl Iterator<Item = &'a Prompt>) -> u64 {
    let mut seen = HashSet::new();
    let mut computed = 0;
    for prompt in prompts {
        let held = prompt.chain.iter().take_while(|unit| seen.contains(*unit)).count();
        let tokens = prompt.tokens.len() as u32;
        computed += u64::from(tokens - predicted_tokens(tokens, held as u32));
        seen.extend(prompt.chain.iter().copied());
    }
    computed
}
