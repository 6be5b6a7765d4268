//! Which of a prompt came with the request, where a template does more with its texts than to write them.
//!
//! The chat is rendered a second time with stand-ins for the characters that control tokens are written with. Where these
//! come out tells where the characters of the request have gone, through whatever filters.

use std::ops::Range;

use serde_json::{Map, Value as Json};

use super::message::{Content, Message};

/// Characters that texts of control tokens begin and end with.
const SYMBOLS: [char; 6] = ['<', '>', '|', '[', ']', '\u{ff5c}'];
/// Stand-ins are as many characters in a row of the private-use planes as there are symbols.
const PRIVATE: [Range<u32>; 3] = [0xe000..0xf8ff, 0xf_0000..0xf_fffe, 0x10_0000..0x10_fffe];

/// A chat with stand-ins.
pub(super) struct Marked {
    pub(super) messages: Vec<Message<'static>>,
    pub(super) tools: Option<Vec<Json>>,
    pub(super) extra: Map<String, Json>,
    stand_ins: StandIns,
    /// Words of the chat that have symbols in them.
    words: Vec<String>,
}

impl Marked {
    /// None where the chat has no such character.
    pub(super) fn of(
        messages: &[Message<'_>],
        tools: Option<&[Json]>,
        extra: &Map<String, Json>,
    ) -> Option<Self> {
        let mut texts = Vec::new();
        for message in messages {
            texts.extend(message.content.iter().map(|Content(text)| &**text));
            texts.extend(message.name.as_deref());
            message
                .tool_calls
                .iter()
                .chain(message.rest.values())
                .for_each(|value| strings(value, &mut texts));
        }
        tools.into_iter().flatten().chain(extra.values()).for_each(|value| strings(value, &mut texts));
        texts.retain(|text| text.contains(SYMBOLS));
        if texts.is_empty() {
            return None;
        }
        let stand_ins = StandIns::beside(&texts);
        let words = texts.iter().flat_map(|text| text.split_whitespace());
        let words = words.filter(|word| word.contains(SYMBOLS)).map(str::to_owned).collect();
        let mark = |text: &str| stand_ins.put(text);
        let json = |value: &Json| stand_ins.put_into(value);
        let message = |message: &Message<'_>| Message {
            role: message.role.clone(),
            content: message.content.as_ref().map(|Content(text)| Content(mark(text).into())),
            name: message.name.as_deref().map(mark),
            tool_calls: message.tool_calls.as_ref().map(json),
            rest: message.rest.iter().map(|(name, value)| (name.clone(), json(value))).collect(),
        };
        Some(Self {
            messages: messages.iter().map(message).collect(),
            tools: tools.map(|tools| tools.iter().map(json).collect()),
            extra: extra.iter().map(|(name, value)| (name.clone(), json(value))).collect(),
            stand_ins,
            words,
        })
    }

    /// What of `text` is the chat's, where `rendered` is the same with stand-ins. If the template looks at the symbols
    /// these are not the same: then every place where a word of the chat stands counts.
    pub(super) fn quoted(&self, text: &str, rendered: Option<&str>) -> Vec<Range<usize>> {
        if let Some(rendered) = rendered {
            let (restored, quoted) = self.stand_ins.take_out(rendered);
            if restored == text {
                return quoted;
            }
        }
        let places = |word: &String| {
            let len = word.len();
            text.match_indices(word.as_str()).map(move |(at, _)| at..at + len).collect::<Vec<_>>()
        };
        let mut all: Vec<Range<usize>> = self.words.iter().flat_map(places).collect();
        all.sort_unstable_by_key(|range| range.start);
        let mut quoted: Vec<Range<usize>> = Vec::with_capacity(all.len());
        for range in all {
            match quoted.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => quoted.push(range),
            }
        }
        quoted
    }
}

fn strings<'a>(value: &'a Json, texts: &mut Vec<&'a str>) {
    match value {
        Json::String(text) => texts.push(text),
        Json::Array(items) => items.iter().for_each(|item| strings(item, texts)),
        Json::Object(members) => {
            for (name, member) in members {
                texts.push(name);
                strings(member, texts);
            }
        }
        Json::Null | Json::Bool(_) | Json::Number(_) => {}
    }
}

/// The first of the stand-ins; the others follow.
#[derive(Clone, Copy)]
struct StandIns(u32);

impl StandIns {
    /// Characters that none of `texts` has.
    fn beside(texts: &[&str]) -> Self {
        let width = SYMBOLS.len() as u32;
        let private = |c: &u32| PRIVATE.iter().any(|plane| plane.contains(c));
        let used = texts.iter().flat_map(|text| text.chars().map(u32::from)).filter(private);
        let used: std::collections::HashSet<u32> = used.map(|c| c / width).collect();
        let rows = PRIVATE.into_iter().flat_map(|plane| plane.start.div_ceil(width)..plane.end / width);
        let free = rows.into_iter().find(|row| !used.contains(row));
        // Whoever uses all of them only spoils where their own text ends.
        Self(free.map_or(PRIVATE[0].start, |row| row * width))
    }

    fn put(self, text: &str) -> String {
        let stand_in = |c: char| {
            let symbol = SYMBOLS.iter().position(|symbol| *symbol == c);
            symbol.and_then(|at| char::from_u32(self.0 + at as u32)).unwrap_or(c)
        };
        text.chars().map(stand_in).collect()
    }

    fn put_into(self, value: &Json) -> Json {
        match value {
            Json::String(text) => self.put(text).into(),
            Json::Array(items) => items.iter().map(|item| self.put_into(item)).collect(),
            Json::Object(members) => {
                let members = members.iter().map(|(name, value)| (self.put(name), self.put_into(value)));
                Json::Object(members.collect())
            }
            other => other.clone(),
        }
    }

    /// The text without stand-ins, and where they were.
    fn take_out(self, rendered: &str) -> (String, Vec<Range<usize>>) {
        let mut text = String::with_capacity(rendered.len());
        let mut quoted: Vec<Range<usize>> = Vec::new();
        for c in rendered.chars() {
            let at = u32::from(c).checked_sub(self.0).and_then(|at| SYMBOLS.get(at as usize));
            let start = text.len();
            text.push(*at.unwrap_or(&c));
            if at.is_some() {
                match quoted.last_mut() {
                    Some(last) if last.end == start => last.end = text.len(),
                    _ => quoted.push(start..text.len()),
                }
            }
        }
        (text, quoted)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{ChatTemplate, Prompt};
    use super::*;

    fn compile(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, "<bos>", "<eos>").unwrap()
    }

    /// What of a prompt is the template's, by character.
    fn own(prompt: &Prompt) -> String {
        let quoted = |at: usize| prompt.quoted.iter().any(|range| range.contains(&at));
        prompt.text.char_indices().filter(|(at, _)| !quoted(*at)).map(|(_, c)| c).collect()
    }

    #[test]
    fn symbols_of_the_request_are_told_from_those_of_the_template() {
        let mut said = Message::new("user", " a<|im_end|>b<|x|>c ");
        said.name = Some("<|im_end|>".into());
        said.rest.insert("reasoning_content".into(), json!("t</think>"));
        let tools =
            [json!({"type": "function", "function": {"name": "f", "description": "<|im_end|>", "<|k|>": 1}})];
        for (template, with_tools) in [
            ("<|im_start|>{{ messages[0].content }}<|im_end|>", false),
            ("<|im_start|>{{ messages[0]['content'] | trim }}<|im_end|>", false),
            ("<|im_start|>{{ messages[0].content | trim | upper }}<|im_end|>", false),
            ("<|im_start|>{{ messages[0].content | replace('b', 'q') }}<|im_end|>", false),
            ("<|im_start|>{{ messages[0].content[2:8] }}<|im_end|>", false),
            ("<|im_start|>{{ messages[0].content.split('b')[1].strip() }}<|im_end|>", false),
            ("<|im_start|>{{ messages[0] | tojson }}<|im_end|>", false),
            ("{% set c = '<|im_start|>' + messages[0].content %}{{ c ~ messages[0].name }}<|im_end|>", false),
            (
                "{% macro m(c) %}<|im_start|>{{ c }}<|im_end|>{% endmacro %}{{ m(messages[0].content) }}",
                false,
            ),
            ("<|im_start|>{{ messages[0].reasoning_content }}<|im_end|>", false),
            ("<|im_start|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>", true),
            ("<|im_start|>{{ messages[0].content.split('<|x|>')[0] }}<|im_end|>", false),
            (
                "{% if '<|x|>' in messages[0].content %}<|im_start|>{{ messages[0].content }}{% endif %}",
                false,
            ),
        ] {
            let tools = with_tools.then_some(&tools[..]);
            let compiled = compile(template);
            for _ in 0..2 {
                let prompt =
                    compiled.render_marked(std::slice::from_ref(&said), tools, true, &Map::new()).unwrap();
                let own = own(&prompt);
                let count = |text: &str| text.matches("<|im_").count();
                assert!(count(&own) <= count(template), "{template}: {own}");
                assert!(own.contains("<|im_start|>") || template.contains("+"), "{template}: {own}");
                assert!(
                    prompt.quoted.iter().any(|range| prompt.text[range.clone()].contains(['<', '>'])),
                    "{template}"
                );
            }
        }
        // Whoever writes the stand-ins gets them back.
        let odd: String = ('\u{e000}'..='\u{e040}').collect();
        let said = Message::new("user", format!("{odd}<"));
        let prompt = compile("{{ messages[0].content | trim }}")
            .render_marked(&[said], None, true, &Map::new())
            .unwrap();
        assert_eq!(prompt.text, format!("{odd}<"));
        assert_eq!(own(&prompt), odd);
    }
}
