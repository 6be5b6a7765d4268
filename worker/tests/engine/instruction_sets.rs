//! Environment variables choose kernels, and the integer path gives the same bits with all of them.

use crate::harness::{Output, QUANT, Request, open_on, options, prompt, together};
use kernels::isa::Isa;
use kvasir_worker::load;

/// One model for each other weight format with an integer path, in addition to [`QUANT`].
const OTHERS: [&str; 2] = ["quant/qwen3-q/qwen3-q-q8_0", "quant/qwen3-q/qwen3-q-nvfp4"];

/// Runs with one variable set. Also returns the device's instruction sets.
fn run(model: &str, variable: &str, value: &str) -> (Vec<Output>, String) {
    let environment = |name: &str| (name == variable).then(|| value.to_owned());
    let backend = load::backend(&options(model), &environment).unwrap();
    let mut engine = open_on(model, &options(model), backend);
    let requests: Vec<Request> =
        [9, 70].iter().map(|len| Request::greedy(prompt(*len, *len as usize), 10)).collect();
    let outputs = together(&mut engine, &requests);
    (outputs, engine.decoder().backend().info().isa.clone())
}

#[test]
fn integer_products_are_the_same_on_every_instruction_set() {
    for model in QUANT.into_iter().chain(OTHERS) {
        let (best, _) = run(model, "", "");
        for isa in Isa::available() {
            let (outputs, isas) = run(model, "KVASIR_MATMUL_BACKEND", &format!("cpu-{isa}"));
            assert!(isas.starts_with(isa.name()), "{isas}");
            for (best, output) in best.iter().zip(&outputs) {
                assert_eq!(best.tokens, output.tokens, "{model} on {isa}");
                assert!(best.logits == output.logits, "{model} on {isa}: other logits");
            }
        }
    }
}

#[test]
fn one_setting_selects_all_kernels() {
    for isa in Isa::available() {
        let (outputs, isas) = run(QUANT[0], "KVASIR_BACKEND", &format!("cpu-{isa}"));
        assert_eq!(isas, isa.name());
        assert!(outputs.iter().all(|output| output.tokens.len() == 10));
    }
}

#[test]
fn unavailable_kernels_are_an_error() {
    let environment = |name: &str| (name == "KVASIR_ATTENTION_BACKEND").then(|| "cuda".to_owned());
    let error = load::backend(&options(QUANT[0]), &environment).err().unwrap();
    assert_eq!(
        error.to_string(),
        "KVASIR_ATTENTION_BACKEND selects backend \"cuda\" for attention, which is unknown; \
         known are cpu-scalar, cpu-avx2, cpu-avx512, cpu-neon, cpu-neon-i8mm"
    );
}
