//! Chooses the instruction set of each operation: one registry per operation, one provider per instruction
//! set.

use crate::backend::ActivationMode;
use crate::isa::Isa;
use crate::registry::{Operation, Provider, Refusal, Registry, SelectError};

/// Instruction sets and arithmetic of a CPU backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuConfig {
    /// Instruction set of the products.
    pub matmul: Isa,
    pub attention: Isa,
    /// Instruction set of everything else.
    pub rows: Isa,
    /// Type that quantised matrices are multiplied with.
    pub activations: ActivationMode,
}

/// Products with weights; `KVASIR_MATMUL_BACKEND`.
#[derive(Debug, Clone, Copy)]
pub struct Matmul;

/// Attention over the KV cache; `KVASIR_ATTENTION_BACKEND`.
#[derive(Debug, Clone, Copy)]
pub struct Attention;

/// Ops on one row at a time, such as norms and rotary embeddings; `KVASIR_ROWS_BACKEND`.
#[derive(Debug, Clone, Copy)]
pub struct Rows;

/// Every instruction set serves every type and shape, so the request is empty.
impl Operation for Matmul {
    type Request = ();
    type Service = Isa;
    const NAME: &'static str = "matmul";
}

/// As [`Matmul`].
impl Operation for Attention {
    type Request = ();
    type Service = Isa;
    const NAME: &'static str = "attention";
}

/// As [`Matmul`].
impl Operation for Rows {
    type Request = ();
    type Service = Isa;
    const NAME: &'static str = "rows";
}

impl CpuConfig {
    /// Selects the best instruction sets of this processor, unless the environment chooses. `KVASIR_BACKEND`
    /// applies to all operations; `KVASIR_MATMUL_BACKEND`, `KVASIR_ATTENTION_BACKEND` and
    /// `KVASIR_ROWS_BACKEND` apply to one. Each is one of `cpu-scalar`, `cpu-avx2`, `cpu-avx512`, `cpu-neon`
    /// and `cpu-neon-i8mm`. `environment` looks up a variable.
    /// # Errors
    /// [`SelectError::Demand`] if the environment's choice is unknown or unavailable.
    pub fn select(
        activations: ActivationMode,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, SelectError> {
        let environment = &environment;
        Ok(Self {
            matmul: *registry::<Matmul>().select(&(), environment)?.service(),
            attention: *registry::<Attention>().select(&(), environment)?.service(),
            rows: *registry::<Rows>().select(&(), environment)?.service(),
            activations,
        })
    }
}

/// The kernels of one instruction set.
struct Level(Isa);

impl<O: Operation<Request = (), Service = Isa>> Provider<O> for Level {
    fn name(&self) -> &str {
        match self.0 {
            Isa::Scalar => "cpu-scalar",
            Isa::Avx2 => "cpu-avx2",
            Isa::Avx512 => "cpu-avx512",
            Isa::Neon => "cpu-neon",
            Isa::NeonI8mm => "cpu-neon-i8mm",
        }
    }

    fn rank(&self) -> i32 {
        match self.0 {
            Isa::Scalar => 0,
            Isa::Avx2 | Isa::Neon => 10,
            Isa::Avx512 | Isa::NeonI8mm => 20,
        }
    }

    fn available(&self) -> Result<(), String> {
        if self.0.is_available() { Ok(()) } else { Err(Refusal::Isa { isa: self.0 }.to_string()) }
    }

    fn can_serve(&self, (): &()) -> Result<(), Refusal> {
        Ok(())
    }

    fn service(&self) -> &Isa {
        &self.0
    }
}

fn registry<O: Operation<Request = (), Service = Isa>>() -> Registry<O> {
    let mut registry = Registry::new(Box::new(Level(Isa::Scalar)));
    for isa in Isa::ALL.into_iter().filter(|isa| *isa != Isa::Scalar) {
        registry.register(Box::new(Level(isa)));
    }
    registry
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(environment: &[(&str, &str)]) -> Result<[Isa; 3], SelectError> {
        let look_up =
            |name: &str| environment.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string());
        let config = CpuConfig::select(ActivationMode::Int8, look_up)?;
        assert_eq!(config.activations, ActivationMode::Int8);
        Ok([config.matmul, config.attention, config.rows])
    }

    #[test]
    fn the_table_of_choices() {
        let best = Isa::detect();
        type Case<'a> = (&'a [(&'a str, &'a str)], [Isa; 3]);
        let cases: &[Case<'_>] = &[
            (&[], [best; 3]),
            (&[("KVASIR_BACKEND", ""), ("KVASIR_ROWS_BACKEND", "")], [best; 3]),
            (&[("KVASIR_BACKEND", "cpu-scalar")], [Isa::Scalar; 3]),
            (&[("KVASIR_MATMUL_BACKEND", "cpu-scalar")], [Isa::Scalar, best, best]),
            (&[("KVASIR_ATTENTION_BACKEND", "cpu-scalar")], [best, Isa::Scalar, best]),
            (&[("KVASIR_ROWS_BACKEND", "cpu-scalar")], [best, best, Isa::Scalar]),
        ];
        for (environment, expected) in cases {
            assert_eq!(select(environment), Ok(*expected), "{environment:?}");
        }
        for isa in Isa::available() {
            let name = format!("cpu-{isa}");
            let environment = [("KVASIR_BACKEND", "cpu-scalar"), ("KVASIR_MATMUL_BACKEND", name.as_str())];
            assert_eq!(select(&environment), Ok([isa, Isa::Scalar, Isa::Scalar]));
        }
    }

    #[test]
    fn an_unusable_backend_in_the_environment_is_an_error() {
        assert_eq!(
            select(&[("KVASIR_BACKEND", "cuda")]).unwrap_err().to_string(),
            "KVASIR_BACKEND selects backend \"cuda\" for matmul, which is unknown; known are cpu-scalar, \
             cpu-avx2, cpu-avx512, cpu-neon, cpu-neon-i8mm"
        );
        for operation in ["MATMUL", "ATTENTION", "ROWS"] {
            let variable = format!("KVASIR_{operation}_BACKEND");
            let error = select(&[(&variable, "avx1024")]).unwrap_err().to_string();
            assert!(error.starts_with(&variable), "{error}");
        }
        for isa in Isa::ALL.into_iter().filter(|isa| !isa.is_available()) {
            let error = select(&[("KVASIR_BACKEND", &format!("cpu-{isa}"))]).unwrap_err().to_string();
            assert!(error.contains(&format!("not available here: this processor has no {isa}")), "{error}");
        }
    }
}
