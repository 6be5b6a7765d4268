//! Cache salts. A request carries one salt for its root, so that an engine never shares blocks between roots.
//!
//! The salt contains the root: an engine's events return the salt of a chain's first block, which names the
//! chain even if this process has not seen the request. A root is a keyed hash, so a salt cannot be guessed.

use proto::block::BlockId;

const PREFIX: &str = "kvasir-";

/// The salt of a root: 39 characters.
pub fn salt_of(root: BlockId) -> String {
    format!("{PREFIX}{root}")
}

/// The root of a salt that [`salt_of`] made.
pub fn root_of(salt: &str) -> Option<BlockId> {
    let digits = salt.strip_prefix(PREFIX)?.as_bytes();
    let (pairs, []) = digits.as_chunks::<2>() else { return None };
    let bytes: Option<Vec<u8>> =
        pairs.iter().map(|&[high, low]| Some(digit(high)? << 4 | digit(low)?)).collect();
    Some(BlockId(bytes?.try_into().ok()?))
}

fn digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_salt_names_its_root_and_nothing_else_does() {
        let root = BlockId(std::array::from_fn(|i| 0xa0 + i as u8));
        assert_eq!(root_of(&salt_of(root)), Some(root));
        let salt = salt_of(root);
        for wrong in
            ["", "kvasir-", "kvasir-00", &salt[..38], &format!("{salt}0"), &salt.to_uppercase(), "ключ-00"]
        {
            assert_eq!(root_of(wrong), None, "{wrong}");
        }
    }
}
