//! Chooses the backend that serves an operation.
//!
//! An [`Operation`] is a name and a type of request; a [`Provider`] is one implementation. The choice is, in
//! order: the provider that the environment names (`KVASIR_<OP>_BACKEND`, else `KVASIR_BACKEND`), which is
//! used or the choice fails; the provider of highest rank that is available on this host and can serve the
//! request; the built-in provider. A caller may also name the provider, or take all that can serve. The registry
//! has no code for any particular operation.

use crate::isa::Isa;
use std::cmp::Reverse;

#[cfg(test)]
mod tests;

/// A kind of work that has several implementations.
pub trait Operation {
    /// Everything that decides whether a provider can serve, including options.
    type Request: ?Sized;
    /// Interface through which the chosen provider is used.
    type Service: ?Sized;
    /// In lower case with underscores. The variable `KVASIR_<NAME>_BACKEND` has it in upper case.
    const NAME: &'static str;
}

/// Reason why a provider does not serve a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// An element or weight type without a kernel.
    #[error("no kernel for type {ty}")]
    Type { ty: &'static str },
    /// An argument that the provider does not implement. It must refuse rather than ignore it.
    #[error("argument {argument} is not supported")]
    Argument { argument: &'static str },
    /// A size beyond what the provider serves.
    #[error("{what} is {found}, at most {limit}")]
    TooLarge {
        what: &'static str,
        /// The size in the request.
        found: usize,
        limit: usize,
    },
    /// The files that the provider reads are missing or have another format.
    #[error("{reason}")]
    Artefact { reason: String },
    /// An instruction set that the processor lacks.
    #[error("this processor has no {isa}")]
    Isa { isa: Isa },
}

/// One implementation of an operation.
pub trait Provider<O: Operation>: Send + Sync {
    /// The name that the environment variables use.
    fn name(&self) -> &str;

    fn rank(&self) -> i32;

    /// Checks cheaply whether this host has the device, driver or instruction set.
    ///
    /// # Errors
    /// The missing part.
    fn available(&self) -> Result<(), String>;

    /// Checks whether the provider serves the whole request. A provider that would ignore part of it must
    /// refuse.
    ///
    /// # Errors
    /// The first unsupported property of the request.
    fn can_serve(&self, request: &O::Request) -> Result<(), Refusal>;

    fn service(&self) -> &O::Service;
}

/// No provider could be chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectError {
    /// The environment, or the caller, names a backend that does not exist, cannot run here or refuses the
    /// request.
    #[error("{variable} selects backend {backend:?} for {operation}, which {fault}")]
    Demand {
        /// The variable that was set, or the caller's option.
        variable: String,
        backend: String,
        operation: &'static str,
        /// Why the named backend cannot be used.
        fault: DemandFault,
    },
    /// There is no built-in provider, and no other can serve.
    #[error(
        "no backend serves {operation}{}",
        tried.iter().map(|refusal| format!("; {refusal}")).collect::<String>()
    )]
    Nobody {
        operation: &'static str,
        /// Each provider's name and its reason.
        tried: Vec<String>,
    },
    /// The built-in provider refuses, and no other can serve.
    #[error("no backend serves this request for {operation}: {refusal}")]
    NoProvider {
        operation: &'static str,
        /// The refusal of the built-in provider.
        refusal: Refusal,
    },
}

/// Why a named backend is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DemandFault {
    /// No provider has this name.
    #[error("is unknown; known are {}", if names.is_empty() { "none".to_owned() } else { names.join(", ") })]
    Unknown { names: Vec<String> },
    /// It cannot run on this host.
    #[error("is not available here: {reason}")]
    Unavailable { reason: String },
    /// It does not serve this request.
    #[error("cannot serve this request: {0}")]
    Refused(Refusal),
}

/// The providers of one operation, at most one of them built in.
pub struct Registry<O: Operation> {
    builtin: Option<Box<dyn Provider<O>>>,
    others: Vec<Box<dyn Provider<O>>>,
}

impl<O: Operation> std::fmt::Debug for Registry<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registry").field("operation", &O::NAME).field("providers", &self.names()).finish()
    }
}

impl<O: Operation> Registry<O> {
    /// A registry that falls back to `builtin`.
    pub fn new(builtin: Box<dyn Provider<O>>) -> Self {
        Self { builtin: Some(builtin), others: Vec::new() }
    }

    /// A registry without a built-in provider.
    pub fn empty() -> Self {
        Self { builtin: None, others: Vec::new() }
    }

    /// Adds a provider. Among equal ranks the one added first is preferred.
    pub fn register(&mut self, provider: Box<dyn Provider<O>>) {
        self.others.push(provider);
    }

    /// Names of all providers, the built-in first.
    pub fn names(&self) -> Vec<&str> {
        self.all().map(|provider| provider.name()).collect()
    }

    /// Chooses the provider for a request, in the order that the module describes. `environment` looks up a
    /// variable; an empty value counts as unset.
    ///
    /// # Errors
    /// [`SelectError::Demand`] if the backend that the environment names cannot be used,
    /// [`SelectError::NoProvider`] if even the built-in provider refuses, [`SelectError::Nobody`] if there is
    /// no built-in provider and all refuse.
    pub fn select(
        &self,
        request: &O::Request,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<&dyn Provider<O>, SelectError> {
        Ok(self.candidates(request, environment)?.0)
    }

    /// The provider that [`Self::select`] chooses, and the others that can serve, by descending rank. There are
    /// no others if the environment names one.
    ///
    /// # Errors
    /// Those of [`Self::select`].
    #[expect(clippy::type_complexity, reason = "a pair of the choice and the rest")]
    pub fn candidates(
        &self,
        request: &O::Request,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<(&dyn Provider<O>, Vec<&dyn Provider<O>>), SelectError> {
        let own = format!("KVASIR_{}_BACKEND", O::NAME.to_ascii_uppercase());
        for variable in [own.as_str(), "KVASIR_BACKEND"] {
            if let Some(backend) = environment(variable).filter(|backend| !backend.is_empty()) {
                return Ok((self.named(variable, &backend, request)?, Vec::new()));
            }
        }
        let others = self.others.iter().map(Box::as_ref).filter(|provider| provider.available().is_ok());
        let mut serving: Vec<&dyn Provider<O>> = others
            .chain(self.builtin.as_deref())
            .filter(|provider| provider.can_serve(request).is_ok())
            .collect();
        // Stable: among equal ranks the built-in provider is last.
        serving.sort_by_key(|provider| Reverse(provider.rank()));
        let mut serving = serving.into_iter();
        match (serving.next(), self.builtin.as_deref().map(|builtin| builtin.can_serve(request))) {
            (Some(best), _) => Ok((best, serving.collect())),
            (None, Some(Err(refusal))) => Err(SelectError::NoProvider { operation: O::NAME, refusal }),
            (None, _) => Err(SelectError::Nobody { operation: O::NAME, tried: self.tried(request) }),
        }
    }

    /// The provider of this name. `option` names the choice in the error.
    ///
    /// # Errors
    /// [`SelectError::Demand`] if it cannot be used.
    pub fn named(
        &self,
        option: &str,
        backend: &str,
        request: &O::Request,
    ) -> Result<&dyn Provider<O>, SelectError> {
        self.select_by_name(backend, request).map_err(|fault| SelectError::Demand {
            variable: option.to_owned(),
            backend: backend.to_owned(),
            operation: O::NAME,
            fault,
        })
    }

    fn all(&self) -> impl Iterator<Item = &dyn Provider<O>> {
        self.builtin.iter().chain(&self.others).map(Box::as_ref)
    }

    fn tried(&self, request: &O::Request) -> Vec<String> {
        let refusal_text = |provider: &dyn Provider<O>| match provider.available() {
            Err(reason) => Some(format!("{}: {reason}", provider.name())),
            Ok(()) => {
                provider.can_serve(request).err().map(|refusal| format!("{}: {refusal}", provider.name()))
            }
        };
        self.all().filter_map(refusal_text).collect()
    }

    fn select_by_name(&self, name: &str, request: &O::Request) -> Result<&dyn Provider<O>, DemandFault> {
        let Some(provider) = self.all().find(|provider| provider.name() == name) else {
            let names = self.names().into_iter().map(str::to_owned).collect();
            return Err(DemandFault::Unknown { names });
        };
        provider.available().map_err(|reason| DemandFault::Unavailable { reason })?;
        provider.can_serve(request).map_err(DemandFault::Refused)?;
        Ok(provider)
    }
}
