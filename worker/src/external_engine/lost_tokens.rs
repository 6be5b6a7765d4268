//! Token ids that llama-server does not send.
//!
//! Its stream leaves out the ids of tokens that end inside a character, and sends the whole character with the id of
//! the token that completes it. Here the missing ids are those of the tokenizer for that text. A model that wrote the
//! character with other tokens gets these ids in the answer; the text is the same.

use external::EngineToken;
use std::sync::Arc;
use text::tokenizer::Tokenizer;

/// Longest text that a server may hold back.
const MAX_PENDING: usize = 64 << 10;

pub(super) struct LostTokens {
    tokenizer: Arc<Tokenizer>,
    /// Text of tokens whose ids have come, which the server holds back.
    pending: Vec<u8>,
}

impl LostTokens {
    pub(super) fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, pending: Vec::new() }
    }

    /// The tokens of an event with `text`, with those that are missing before them.
    pub(super) fn complete(&mut self, tokens: Vec<EngineToken>, text: &str) -> Vec<EngineToken> {
        let own: Vec<u8> = tokens.iter().flat_map(|token| self.bytes(token.id)).copied().collect();
        let expected = [&self.pending[..], &own].concat();
        if let Some(rest) = expected.strip_prefix(text.as_bytes()) {
            self.pending = if rest.len() <= MAX_PENDING { rest.to_vec() } else { Vec::new() };
            return tokens;
        }
        let pending = std::mem::take(&mut self.pending);
        let more = text.get(pending.len()..).filter(|_| text.as_bytes().starts_with(&pending));
        // Any other text is none of these tokens, for example of a token that is shown in another way.
        let ends_here =
            |more: &&str| !own.is_empty() && more.len() > own.len() && more.as_bytes().ends_with(&own);
        let Some(more) = more.filter(ends_here) else {
            return tokens;
        };
        let ids = self.tokenizer.encode(more, false);
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.bytes(id)).copied().collect();
        if bytes != more.as_bytes() {
            return tokens;
        }
        let unknown = |id: &u32| EngineToken { id: *id, logprobs: None };
        let sent: Vec<u32> = tokens.iter().map(|token| token.id).collect();
        match ids.strip_suffix(&sent[..]) {
            Some(lost) => lost.iter().map(unknown).chain(tokens).collect(),
            None => ids.iter().map(unknown).collect(),
        }
    }

    fn bytes(&self, id: u32) -> &[u8] {
        match self.tokenizer.is_special(id) {
            true => &[],
            false => self.tokenizer.token_bytes(id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::ModelFile;

    fn tokenizer() -> Arc<Tokenizer> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/tiny/qwen2");
        let file = std::fs::read_dir(path)
            .unwrap()
            .flatten()
            .find(|entry| entry.path().extension().is_some_and(|extension| extension == "gguf"));
        let file = ModelFile::open(file.unwrap().path()).unwrap();
        Arc::new(Tokenizer::from_metadata(file.metadata()).unwrap())
    }

    fn token(id: u32) -> EngineToken {
        EngineToken { id, logprobs: None }
    }

    /// Sends tokens as llama-server does: an id for each token after which the text is whole.
    fn sent(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<(u32, String)> {
        let (mut bytes, mut events) = (Vec::new(), Vec::new());
        for &id in ids {
            bytes.extend_from_slice(tokenizer.token_bytes(id));
            if let Ok(text) = std::str::from_utf8(&bytes) {
                events.push((id, text.to_owned()));
                bytes.clear();
            }
        }
        events
    }

    #[test]
    fn ids_inside_a_character_are_found_again() {
        let tokenizer = tokenizer();
        let text = "One 😀, two 𝔘𝔫, 你好 żółw — ok";
        let ids = tokenizer.encode(text, false);
        let events = sent(&tokenizer, &ids);
        assert!(events.len() < ids.len(), "every character is one token: {ids:?}");
        let mut lost = LostTokens::new(Arc::clone(&tokenizer));
        let found: Vec<u32> = events
            .iter()
            .flat_map(|(id, text)| lost.complete(vec![token(*id)], text))
            .map(|token| token.id)
            .collect();
        assert_eq!(found, ids);
    }

    #[test]
    fn text_that_is_held_back_is_no_sign_of_lost_tokens() {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode("stop here", false);
        let mut lost = LostTokens::new(Arc::clone(&tokenizer));
        for (number, &id) in ids.iter().enumerate() {
            let text = if number + 1 == ids.len() { "stop here" } else { "" };
            assert_eq!(lost.complete(vec![token(id)], text), [token(id)]);
        }
        assert_eq!(lost.complete(vec![token(ids[0])], "<another text>"), [token(ids[0])]);
    }
}
