//! Classes of characters that components of tokenizer files distinguish.

use unicode_general_category::{GeneralCategory as G, get_general_category};

/// `\w` of expressions: letters, marks, decimal digits, connectors and joiners.
pub(super) fn is_word(c: char) -> bool {
    if c.is_ascii() {
        return c.is_ascii_alphanumeric() || c == '_';
    }
    c.is_alphabetic()
        || matches!(c, '\u{200c}' | '\u{200d}')
        || is_mark(c)
        || matches!(get_general_category(c), G::DecimalNumber | G::ConnectorPunctuation)
}

/// Any combining mark.
pub(super) fn is_mark(c: char) -> bool {
    !c.is_ascii() && matches!(get_general_category(c), G::NonspacingMark | G::SpacingMark | G::EnclosingMark)
}

/// Control characters, and those without a meaning of their own.
pub(super) fn is_other(c: char) -> bool {
    matches!(get_general_category(c), G::Control | G::Format | G::PrivateUse | G::Surrogate)
}

/// ASCII symbols, and punctuation elsewhere.
pub(super) fn is_punctuation(c: char) -> bool {
    c.is_ascii_punctuation()
        || (!c.is_ascii()
            && matches!(
                get_general_category(c),
                G::ConnectorPunctuation
                    | G::DashPunctuation
                    | G::OpenPunctuation
                    | G::ClosePunctuation
                    | G::InitialPunctuation
                    | G::FinalPunctuation
                    | G::OtherPunctuation
            ))
}

/// The blocks of CJK ideographs that BERT's vocabularies were made with, a gap in the extensions included.
pub(super) fn is_ideograph(c: char) -> bool {
    matches!(u32::from(c),
        0x3400..=0x4dbf
        | 0x4e00..=0x9fff
        | 0xf900..=0xfaff
        | 0x20000..=0x2a6df
        | 0x2a700..=0x2b73f
        | 0x2b740..=0x2b81f
        | 0x2b920..=0x2ceaf
        | 0x2f800..=0x2fa1f)
}
