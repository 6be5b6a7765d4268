//! Runs `kvasir logits` and compares its results with references.

use crate::binary;
use crate::fixtures::{self, ReferencePrompt};
use anyhow::{Context, ensure};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::Path;

/// Output of `kvasir logits` for one prompt.
#[derive(Debug, Clone)]
pub struct PromptLogits {
    /// Row-major, `[prompt length, vocab]`; the first `cached` rows are NaN.
    pub logits: Vec<f32>,
    pub vocab: usize,
    /// Tokens served from the prefix cache.
    pub cached: usize,
    /// Number of preemptions.
    pub preemptions: usize,
    /// Draft tokens verified, with `--spec`.
    pub drafted: usize,
    /// Draft tokens accepted.
    pub accepted: usize,
    /// Greedy continuation; empty unless requested.
    pub greedy: Vec<u32>,
    /// Recurrent states after the prompt, by name; empty unless requested.
    pub states: BTreeMap<String, Vec<f32>>,
}

/// Runs `kvasir logits MODEL` over `prompts` with further `flags`.
pub fn run(model: &Path, prompts: &[Vec<u32>], flags: &[&str]) -> anyhow::Result<Vec<PromptLogits>> {
    let dir = tempfile::tempdir()?;
    let (ids, out) = (dir.path().join("ids.json"), dir.path().join("out.safetensors"));
    std::fs::write(&ids, serde_json::to_vec(prompts)?)?;
    let path = |path: &Path| path.to_str().map(str::to_owned).context("a path that is not UTF-8");
    let (model, ids, out_text) = (path(model)?, path(&ids)?, path(&out)?);
    let mut arguments = vec!["logits", &model, "--tokens", &ids, "--out", &out_text];
    arguments.extend(flags);
    binary::stdout(&arguments)?;
    read(&out, prompts)
}

fn read(path: &Path, prompts: &[Vec<u32>]) -> anyhow::Result<Vec<PromptLogits>> {
    let bytes = std::fs::read(path).context("kvasir logits wrote no file")?;
    let file = SafeTensors::deserialize(&bytes)?;
    let mut read = Vec::new();
    for (index, prompt) in prompts.iter().enumerate() {
        let logits = file.tensor(&format!("p{index}.logits"))?;
        let &[rows, vocab] = logits.shape() else { anyhow::bail!("p{index}.logits is not a matrix") };
        ensure!(rows == prompt.len(), "p{index}.logits has {rows} rows for {} tokens", prompt.len());
        let count = |name: &str| {
            let tensor = file.tensor(&format!("p{index}.{name}"))?;
            let numbers = fixtures::tokens(tensor.dtype(), tensor.data())?;
            let &[number] = numbers.as_slice() else { anyhow::bail!("p{index}.{name} is not one number") };
            Ok(number as usize)
        };
        let (cached, preemptions) = (count("cached")?, count("preemptions")?);
        let draft_tokens = file.names().iter().any(|name| **name == format!("p{index}.drafted"));
        let (drafted, accepted) = if draft_tokens { (count("drafted")?, count("accepted")?) } else { (0, 0) };
        ensure!(cached < rows, "p{index}: {cached} of {rows} tokens cached, but one must be computed");
        let greedy = match file.tensor(&format!("p{index}.greedy")) {
            Ok(greedy) => fixtures::tokens(greedy.dtype(), greedy.data())?,
            Err(_) => Vec::new(),
        };
        let logits = fixtures::floats(logits.dtype(), logits.data())?;
        let (hit, computed) = logits.split_at(cached * vocab);
        ensure!(hit.iter().all(|x| x.is_nan()), "p{index}: rows of cached tokens are not NaN");
        ensure!(computed.iter().all(|x| x.is_finite()), "p{index}: a computed logit is not finite");
        let states = fixtures::states(&file, index)?;
        read.push(PromptLogits { logits, vocab, cached, preemptions, drafted, accepted, greedy, states });
    }
    Ok(read)
}

impl PromptLogits {
    fn rows(&self) -> usize {
        self.logits.len() / self.vocab
    }

    /// (ours, reference) for every row that both have, in order.
    fn rows_with<'a>(
        &'a self,
        reference: &'a ReferencePrompt,
    ) -> impl Iterator<Item = (&'a [f32], &'a [f32])> {
        assert_eq!(self.vocab, reference.vocab, "vocabulary sizes differ");
        let skipped = self.rows() - reference.rows;
        let ours = self.logits.chunks_exact(self.vocab).skip(skipped);
        ours.zip(reference.logits.chunks_exact(reference.vocab)).skip(self.cached.saturating_sub(skipped))
    }

    /// The largest difference of each row from the reference.
    pub fn row_errors(&self, reference: &ReferencePrompt) -> Vec<f32> {
        let error = |(ours, theirs): (&[f32], &[f32])| {
            ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
        };
        self.rows_with(reference).map(error).collect()
    }

    /// For each row, whether the most likely token is the reference's.
    pub fn row_agreement(&self, reference: &ReferencePrompt) -> Vec<bool> {
        self.rows_with(reference).map(|(ours, theirs)| argmax(ours) == argmax(theirs)).collect()
    }

    /// Fails at the first logit that differs in a bit, over the rows that both computed.
    pub fn expect_same_bits(&self, other: &Self) -> anyhow::Result<()> {
        ensure!(self.logits.len() == other.logits.len(), "shapes differ");
        let from = self.cached.max(other.cached) * self.vocab;
        let pairs = self.logits.iter().zip(&other.logits).enumerate().skip(from);
        for (at, (a, b)) in pairs {
            let (row, token) = (at / self.vocab, at % self.vocab);
            ensure!(a.to_bits() == b.to_bits(), "row {row}, token {token}: {a:e} and {b:e} differ");
        }
        let bits = |states: &BTreeMap<String, Vec<f32>>| -> Vec<(String, Vec<u32>)> {
            states.iter().map(|(name, x)| (name.clone(), x.iter().map(|x| x.to_bits()).collect())).collect()
        };
        ensure!(bits(&self.states) == bits(&other.states), "recurrent states differ");
        ensure!(
            self.greedy == other.greedy,
            "greedy tokens differ: {:?} and {:?}",
            self.greedy,
            other.greedy
        );
        Ok(())
    }
}

fn argmax(row: &[f32]) -> Option<usize> {
    row.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(index, _)| index)
}
