//! Arguments of calls and their binding to parameters.

use super::ast::Name;
use super::value::{Fallible, Value, failed};

/// Arguments of a call.
#[derive(Debug, Default)]
pub(super) struct Args {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(Name, Value)>,
}

impl Args {
    /// Binds arguments to parameter names. The first `required` ones must be present.
    pub(super) fn bind<const N: usize>(
        self,
        function: &str,
        names: [&str; N],
        required: usize,
    ) -> Fallible<[Option<Value>; N]> {
        let given = self.positional.len();
        if given > N {
            return failed(format!("`{function}` takes at most {N} arguments, {given} were given"));
        }
        let mut bound = [const { None }; N];
        for (slot, value) in bound.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            let slot =
                names.iter().position(|parameter| *parameter == &*name).and_then(|at| bound.get_mut(at));
            match slot {
                Some(slot @ None) => *slot = Some(value),
                Some(_) => return failed(format!("`{function}` was given `{name}` twice")),
                None => return failed(format!("`{function}` takes no argument `{name}`")),
            }
        }
        for (name, value) in names.iter().zip(&bound).take(required) {
            if value.is_none() {
                return failed(format!("`{function}` needs the argument `{name}`"));
            }
        }
        Ok(bound)
    }
}

/// Treats an explicit `None` as absent.
pub(super) fn given(value: Option<Value>) -> Option<Value> {
    value.filter(|value| !matches!(value, Value::None))
}
