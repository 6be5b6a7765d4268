//! Reads normalizers, pre-tokenizers, post-processors and decoders.

use std::fmt::Display;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::known;
use super::node::{Fields, Node};
use crate::tokenizer::TokenizerError;
use crate::tokenizer::charsmap::Charsmap;
use crate::tokenizer::decode::TokenDecoder;
use crate::tokenizer::normalize::{Normalizer, Pattern};
use crate::tokenizer::pretokenize::Style;
use crate::tokenizer::splitters::{Behaviour, CharClass, Prepend, Splitter};
use crate::tokenizer::spm::SPACE;

type Read<T> = Result<T, TokenizerError>;

/// Maximum number of components of one kind, those of sequences included.
const MAX_COMPONENTS: usize = 64;

/// Calls `each` with the type and fields of every component, those of sequences in order.
fn components<'a>(
    node: Node<'a>,
    list: &'static str,
    each: &mut impl FnMut(&str, &Node<'a>, Fields<'a>) -> Read<()>,
) -> Read<()> {
    fn walk<'a>(
        node: Node<'a>,
        list: &'static str,
        count: &mut usize,
        each: &mut impl FnMut(&str, &Node<'a>, Fields<'a>) -> Read<()>,
    ) -> Read<()> {
        *count += 1;
        if *count > MAX_COMPONENTS {
            return Err(node.refused(format!("more than {MAX_COMPONENTS} components")));
        }
        let mut fields = node.fields()?;
        let kind = fields.text("type")?.ok_or_else(|| node.refused("has no type"))?;
        if kind != "Sequence" {
            return each(&kind, &node, fields);
        }
        let members = fields.require(list)?.list()?;
        fields.finish()?;
        members.into_iter().try_for_each(|member| walk(member, list, count, each))
    }
    match node.value().is_null() {
        true => Ok(()),
        false => walk(node, list, &mut 0, each),
    }
}

fn unsupported(node: &Node<'_>, kind: &str) -> TokenizerError {
    node.refused(format!("type \"{kind}\" is not supported"))
}

pub(super) fn normalizers(node: Node<'_>) -> Read<Vec<Normalizer>> {
    let mut normalizers = Vec::new();
    components(node, "normalizers", &mut |kind, node, mut fields| {
        let normalizer = match kind {
            "NFC" => Normalizer::Nfc,
            "NFD" => Normalizer::Nfd,
            "NFKC" => Normalizer::Nfkc,
            "NFKD" => Normalizer::Nfkd,
            "Lowercase" => Normalizer::Lowercase,
            "StripAccents" => Normalizer::StripAccents,
            "ByteLevel" => Normalizer::ByteLevel,
            "Precompiled" => Normalizer::Charsmap(Box::new(charsmap(node, &mut fields)?)),
            "Strip" => Normalizer::Strip {
                left: fields.flag("strip_left")?.unwrap_or(true),
                right: fields.flag("strip_right")?.unwrap_or(true),
            },
            "Prepend" => Normalizer::Prepend(
                fields.text("prepend")?.ok_or_else(|| node.refused("has no field `prepend`"))?.into(),
            ),
            "Replace" => {
                let (pattern, content) = replacement(node, &mut fields)?;
                Normalizer::Replace { pattern, content }
            }
            "BertNormalizer" => {
                let lowercase = fields.flag("lowercase")?.unwrap_or(true);
                Normalizer::Bert {
                    clean: fields.flag("clean_text")?.unwrap_or(true),
                    ideographs: fields.flag("handle_chinese_chars")?.unwrap_or(true),
                    strip_accents: fields.flag("strip_accents")?.unwrap_or(lowercase),
                    lowercase,
                }
            }
            _ => return Err(unsupported(node, kind)),
        };
        fields.finish()?;
        normalizers.push(normalizer);
        Ok(())
    })?;
    Ok(normalizers)
}

fn charsmap(node: &Node<'_>, fields: &mut Fields<'_>) -> Read<Charsmap> {
    let field = "precompiled_charsmap";
    let refused = |reason: &dyn Display| node.refused(format!("{field} {reason}"));
    let text = fields.text(field)?.unwrap_or_default();
    let bytes = STANDARD.decode(text).map_err(|_| refused(&"is not base64"))?;
    Charsmap::read(&bytes).map_err(|reason| refused(&reason))
}

fn replacement(node: &Node<'_>, fields: &mut Fields<'_>) -> Read<(Pattern, Box<str>)> {
    let pattern = fields.require("pattern")?.pattern()?;
    let content = fields.text("content")?.ok_or_else(|| node.refused("has no field `content`"))?;
    Ok((pattern, content.into()))
}

/// The splitters of a pre-tokenizer.
pub(super) struct PreTokenizers {
    pub(super) splitters: Vec<Splitter>,
    /// The model reads the bytes of words, as characters of byte-level vocabularies.
    pub(super) bytes: bool,
}

pub(super) fn splitters(node: Node<'_>) -> Read<PreTokenizers> {
    let mut splitters = Vec::new();
    components(node, "pretokenizers", &mut |kind, node, mut fields| {
        match kind {
            "ByteLevel" => {
                if fields.flag("add_prefix_space")?.unwrap_or(true) {
                    splitters.push(Splitter::PrefixSpace);
                }
                if fields.flag("use_regex")?.unwrap_or(true) {
                    splitters.push(Splitter::Style(Style::Gpt2));
                }
                fields.ignore(&["trim_offsets"]);
                splitters.push(Splitter::ByteChars);
            }
            "Split" => {
                let pattern = fields.require("pattern")?;
                let source = pattern.value().get("Regex").and_then(|regex| regex.as_str());
                let behaviour = behaviour(node, fields.text("behavior")?)?
                    .ok_or_else(|| node.refused("has no field `behavior`"))?;
                let invert = fields.flag("invert")?.unwrap_or(false);
                // Scanners take all of a text, so an inverted match changes nothing.
                let scanner = source.and_then(known::scanner).filter(|_| behaviour == Behaviour::Isolated);
                splitters.push(match scanner {
                    Some(style) => Splitter::Style(style),
                    None => Splitter::Split {
                        pattern: pattern.pattern()?,
                        source: source.filter(|_| behaviour == Behaviour::Isolated).map(Into::into),
                        behaviour,
                        invert,
                    },
                });
            }
            "Metaspace" => {
                let mark = fields.character("replacement")?.unwrap_or(SPACE);
                let scheme = fields.text("prepend_scheme")?;
                let adds = fields.flag("add_prefix_space")?;
                let prepend = match (scheme.as_deref(), adds) {
                    (None, Some(false)) | (Some("never"), _) => Prepend::Never,
                    (Some(_), Some(false)) => {
                        return Err(node.refused("`add_prefix_space` and `prepend_scheme` disagree"));
                    }
                    (None | Some("always"), _) => Prepend::Always,
                    (Some("first"), _) => Prepend::First,
                    (Some(other), _) => return Err(node.refused(format!("`prepend_scheme` is \"{other}\""))),
                };
                let split = fields.flag("split")?.unwrap_or(true);
                fields.ignore(&["str_rep"]);
                splitters.push(Splitter::Metaspace { mark, prepend, split });
            }
            "Digits" => {
                let individual = fields.flag("individual_digits")?.unwrap_or(false);
                let behaviour = if individual { Behaviour::Isolated } else { Behaviour::Contiguous };
                splitters.push(Splitter::Chars { class: CharClass::Numeric, behaviour });
            }
            "Punctuation" => {
                let behaviour = behaviour(node, fields.text("behavior")?)?.unwrap_or(Behaviour::Isolated);
                splitters.push(Splitter::Chars { class: CharClass::Punctuation, behaviour });
            }
            "WhitespaceSplit" => splitters.push(removed(CharClass::Space)),
            "CharDelimiterSplit" => {
                let delimiter = fields.character("delimiter")?;
                let delimiter = delimiter.ok_or_else(|| node.refused("has no field `delimiter`"))?;
                splitters.push(removed(CharClass::One(delimiter)));
            }
            "Whitespace" => splitters.push(Splitter::Words),
            "BertPreTokenizer" => {
                splitters.push(removed(CharClass::Space));
                let behaviour = Behaviour::Isolated;
                splitters.push(Splitter::Chars { class: CharClass::Punctuation, behaviour });
            }
            _ => return Err(unsupported(node, kind)),
        }
        fields.finish()
    })?;
    // Nothing follows: the model reads the bytes themselves.
    let bytes = matches!(splitters.last(), Some(Splitter::ByteChars));
    Ok(PreTokenizers { splitters, bytes })
}

fn removed(class: CharClass) -> Splitter {
    Splitter::Chars { class, behaviour: Behaviour::Removed }
}

fn behaviour(node: &Node<'_>, name: Option<String>) -> Read<Option<Behaviour>> {
    Ok(Some(match name.as_deref() {
        None => return Ok(None),
        Some("Removed") => Behaviour::Removed,
        Some("Isolated") => Behaviour::Isolated,
        Some("MergedWithPrevious") => Behaviour::MergedWithPrevious,
        Some("MergedWithNext") => Behaviour::MergedWithNext,
        Some("Contiguous") => Behaviour::Contiguous,
        Some(other) => return Err(node.refused(format!("`behavior` is \"{other}\""))),
    }))
}

/// A decoder, parsed.
#[derive(Debug)]
pub(super) struct Decoding {
    pub(super) decoders: Vec<TokenDecoder>,
    /// The first token of a text is spelled otherwise.
    pub(super) first: bool,
    /// A character, and how many of it at the beginning of a text are removed.
    pub(super) strips: Option<(char, usize)>,
}

pub(super) fn decoder(node: Node<'_>) -> Read<Decoding> {
    if node.value().is_null() {
        return Ok(Decoding { decoders: vec![TokenDecoder::Separated], first: true, strips: None });
    }
    let mut decoding = Decoding { decoders: Vec::new(), first: false, strips: None };
    // The tokens are one text from here on.
    let mut fused = false;
    components(node, "decoders", &mut |kind, node, mut fields| {
        match kind {
            "Fuse" => fused = true,
            "Strip" => {
                let content = fields.character("content")?.unwrap_or(' ');
                let (start, stop) = (fields.count("start")?.unwrap_or(0), fields.count("stop")?.unwrap_or(0));
                match (fused, stop) {
                    (false, _) => decoding.decoders.push(TokenDecoder::Strip { content, start, stop }),
                    (true, 0) if decoding.strips.is_none() => decoding.strips = Some((content, start)),
                    (true, _) => return Err(node.refused("strips the end of a text, which is not supported")),
                }
            }
            _ if fused => return Err(node.refused(format!("type \"{kind}\" after Fuse is not supported"))),
            "Replace" => {
                let (pattern, content) = replacement(node, &mut fields)?;
                decoding.decoders.push(TokenDecoder::Replace { pattern, content });
            }
            "ByteFallback" => decoding.decoders.push(TokenDecoder::ByteFallback),
            "ByteLevel" => {
                fields.ignore(&["add_prefix_space", "trim_offsets", "use_regex"]);
                decoding.decoders.push(TokenDecoder::ByteLevel);
                fused = true;
            }
            "Metaspace" => {
                let mark = fields.character("replacement")?.unwrap_or(SPACE);
                let (scheme, adds) = (fields.text("prepend_scheme")?, fields.flag("add_prefix_space")?);
                fields.ignore(&["split", "str_rep"]);
                let drops_first =
                    scheme.as_deref() != Some("never") && (scheme.is_some() || adds != Some(false));
                decoding.first |= drops_first;
                decoding.decoders.push(TokenDecoder::Metaspace { mark, drops_first });
            }
            "WordPiece" => {
                let prefix = fields.text("prefix")?.unwrap_or_else(|| "##".to_owned()).into();
                let cleans = fields.flag("cleanup")?.unwrap_or(true);
                decoding.first = true;
                decoding.decoders.push(TokenDecoder::WordPiece { prefix, cleans });
            }
            _ => return Err(unsupported(node, kind)),
        }
        fields.finish()
    })?;
    Ok(decoding)
}

/// Special tokens around the texts of a sequence.
#[derive(Debug, Default)]
pub(super) struct Around {
    pub(super) before: Vec<u32>,
    pub(super) after: Vec<u32>,
    /// Before, between and after two texts.
    pub(super) pair: [Vec<u32>; 3],
}

pub(super) fn around(node: Node<'_>, is_token: &impl Fn(u32) -> bool) -> Read<Around> {
    let mut around = Around::default();
    let mut found = false;
    components(node, "processors", &mut |kind, node, mut fields| {
        if kind == "ByteLevel" {
            fields.ignore(&["add_prefix_space", "trim_offsets", "use_regex"]);
            return fields.finish();
        }
        if std::mem::replace(&mut found, true) {
            return Err(node.refused("a second processor that adds tokens is not supported"));
        }
        match kind {
            "TemplateProcessing" => around = template(node, &mut fields, is_token)?,
            "BertProcessing" | "RobertaProcessing" => {
                let mut token = |name: &'static str| -> Read<u32> {
                    let node = fields.require(name)?;
                    let id =
                        node.value().get(1).and_then(|id| id.as_u64()).and_then(|id| u32::try_from(id).ok());
                    id.filter(|id| is_token(*id)).ok_or_else(|| node.refused("names no token"))
                };
                let (cls, sep) = (token("cls")?, token("sep")?);
                let between = if kind == "BertProcessing" { vec![sep] } else { vec![sep, sep] };
                fields.ignore(&["trim_offsets", "add_prefix_space"]);
                around =
                    Around { before: vec![cls], after: vec![sep], pair: [vec![cls], between, vec![sep]] };
            }
            _ => return Err(unsupported(node, kind)),
        }
        fields.finish()
    })?;
    if !found {
        around.pair = Default::default();
    }
    Ok(around)
}

fn template(node: &Node<'_>, fields: &mut Fields<'_>, is_token: &impl Fn(u32) -> bool) -> Read<Around> {
    let special = fields.require("special_tokens")?;
    let ids = |name: &str, at: &Node<'_>| -> Read<Vec<u32>> {
        let ids = special.value().get(name).and_then(|token| token.get("ids")?.as_array());
        let ids = ids.ok_or_else(|| at.refused(format!("`{name}` is not in `special_tokens`")))?;
        let id = |id: &serde_json::Value| {
            id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| is_token(*id))
        };
        ids.iter()
            .map(id)
            .collect::<Option<_>>()
            .ok_or_else(|| at.refused(format!("`{name}` names no token")))
    };
    // Special tokens before the first text, between texts, and after the last.
    let parts = |node: Node<'_>, texts: &[&str]| -> Read<Vec<Vec<u32>>> {
        let mut parts = vec![Vec::new()];
        for piece in node.list()? {
            let mut fields = piece.fields()?;
            match (fields.get("SpecialToken"), fields.get("Sequence")) {
                (Some(token), None) => {
                    let name = token.value().get("id").and_then(|id| id.as_str()).unwrap_or_default();
                    if let Some(last) = parts.last_mut() {
                        last.extend(ids(name, &token)?);
                    }
                }
                (None, Some(text)) => {
                    let name = text.value().get("id").and_then(|id| id.as_str());
                    if name != texts.get(parts.len() - 1).copied() {
                        return Err(text.refused("this order of texts is not supported"));
                    }
                    parts.push(Vec::new());
                }
                _ => return Err(piece.refused("is neither a SpecialToken nor a Sequence")),
            }
            fields.finish()?;
        }
        if parts.len() != texts.len() + 1 {
            return Err(node.refused("does not have every text once"));
        }
        Ok(parts)
    };
    let single = parts(fields.require("single")?, &["A"])?;
    let pair = parts(fields.require("pair")?, &["A", "B"])?;
    let [before, after] = <[_; 2]>::try_from(single).map_err(|_| node.refused("is not complete"))?;
    let pair = <[_; 3]>::try_from(pair).map_err(|_| node.refused("is not complete"))?;
    Ok(Around { before, after, pair })
}
