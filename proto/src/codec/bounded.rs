//! Vectors with a constant limit on their number of elements, for fields whose elements are much larger in
//! memory than on the wire. `#[serde(with...)]` cannot carry a number, so the attribute names both
//! functions. The wire form is that of a plain `Vec`.

use serde::de::{Deserialize, Deserializer, Error as _, SeqAccess, Visitor};
use serde::ser::{Error as _, Serialize, Serializer};
use std::fmt;
use std::marker::PhantomData;

/// Refuses more than `MAX` elements, so that a sender never sends what the receiver refuses.
pub fn serialize<T, S, const MAX: usize>(items: &Vec<T>, serializer: S) -> Result<S::Ok, S::Error>
where
    T: Serialize,
    S: Serializer,
{
    if items.len() > MAX {
        return Err(S::Error::custom(format_args!("{} elements, the limit is {MAX}", items.len())));
    }
    items.serialize(serializer)
}

/// Refuses more than `MAX` elements before it reads the first one. Allocates once.
pub fn deserialize<'de, T, D, const MAX: usize>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    struct Items<T, const MAX: usize>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Items<T, MAX> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "at most {MAX} elements")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<T>, A::Error> {
            let claimed = items.size_hint().unwrap_or(0);
            if claimed > MAX {
                return Err(A::Error::custom(format_args!("{claimed} elements, the limit is {MAX}")));
            }
            let mut all = Vec::with_capacity(claimed);
            while let Some(item) = items.next_element()? {
                all.push(item);
            }
            Ok(all)
        }
    }

    deserializer.deserialize_seq(Items::<T, MAX>(PhantomData))
}
