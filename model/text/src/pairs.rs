//! The prompt of a model that compares two texts and answers by a token.

use serde_json::Map;

use crate::Error;
use crate::chat_template::{ChatTemplate, Message};
use crate::tokenizer::{PairTemplate, Tokenizer};
use metadata::Metadata;

/// Key of the prompt as llama.cpp's converter writes it.
const KEY: &str = "tokenizer.chat_template.rerank";
/// Number of the pooling that gives scores.
const RANK: u64 = 4;

/// Reads the prompt of a model that compares texts: with the places `{query}` and `{document}`, or a chat template of
/// the roles `query` and `document`. `None` if the model has neither, or does not compare texts.
///
/// # Errors
/// [`Error::PairTemplate`] if the prompt lacks a text, [`Error::ChatTemplate`], and keys of a wrong type.
pub fn template(metadata: &Metadata, tokenizer: &Tokenizer) -> Result<Option<PairTemplate>, Error> {
    let arch = metadata.get::<&str>("general.architecture")?.unwrap_or_default();
    if metadata.get::<u64>(&format!("{arch}.pooling_type"))? != Some(RANK) {
        return Ok(None);
    }
    let of_source =
        |key, source: &str| PairTemplate::new(source).map(Some).ok_or(Error::PairTemplate { key });
    if let Some(source) = metadata.get(KEY)? {
        return of_source(KEY, source);
    }
    let Some(template) = ChatTemplate::from_metadata(metadata, tokenizer)? else { return Ok(None) };
    let roles = ["query", "document"];
    if !roles.iter().all(|role| ['"', '\''].iter().any(|q| template.mentions(&format!("{q}{role}{q}")))) {
        return Ok(None);
    }
    let messages = [0, 1].map(|text| Message::new(roles[text], PairTemplate::PLACES[text]));
    of_source("tokenizer.chat_template", &template.render(&messages, None, true, &Map::new())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::tests::tiny;

    fn read(entries: &[(&str, &str)], pooling: u64) -> Result<Option<PairTemplate>, Error> {
        let mut metadata = Metadata::default();
        metadata.insert("general.architecture", "qwen3");
        metadata.insert("qwen3.pooling_type", pooling);
        for &(key, text) in entries {
            metadata.insert(key, text);
        }
        template(&metadata, &tiny("llama"))
    }

    #[test]
    fn prompts_of_both_forms() {
        let expected = PairTemplate::new("<q>{query}<d>{document}<a>\n");
        assert!(expected.is_some());
        assert_eq!(read(&[(KEY, "<q>{query}<d>{document}<a>\n")], RANK).unwrap(), expected);
        let roles = "{%- set q = messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first -%}\n\
            <q>{{ q }}<d>{{ messages | selectattr(\"role\", \"eq\", \"document\") | map(attribute=\"content\") | first }}\
            <a>\n\n";
        assert_eq!(read(&[("tokenizer.chat_template", roles)], RANK).unwrap(), expected);
    }

    #[test]
    fn other_models_have_none() {
        assert_eq!(read(&[(KEY, "{query}{document}")], 3).unwrap(), None);
        assert_eq!(read(&[("tokenizer.chat_template", "{{ messages[0].content }}")], RANK).unwrap(), None);
        assert_eq!(read(&[], RANK).unwrap(), None);
        let error = read(&[(KEY, "{query}")], RANK).unwrap_err();
        assert_eq!(
            error.to_string(),
            "tokenizer.chat_template.rerank must have the places {query} and {document} once each"
        );
        let twice = "{{ messages[0].content }}{{ messages[0].content }}{# 'query' 'document' #}";
        assert!(read(&[("tokenizer.chat_template", twice)], RANK).is_err());
    }
}
