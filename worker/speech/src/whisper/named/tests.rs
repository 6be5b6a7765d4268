//! The same small network in each form gives the same bits.

use super::super::file::Weights;
use super::super::network::Network;
use super::super::network::tests::{HEADS, TOKENS, WIDTH, logits_of, tiny};
use super::*;
use proptest::prelude::*;
use std::io::Cursor;

type Tensors = Vec<(String, Vec<usize>, Vec<f32>)>;

/// The tensors of the small network by other names. Rows of queries, keys and values are apart, and keys have no
/// bias.
fn tensors(style: Style) -> (Tensors, Vec<u8>) {
    let (mut values, _) = tiny();
    // Keys have no bias in these forms.
    for of in ["encoder", "decoder"] {
        let name = format!("{of}/layer_0/self_attention/linear_0/bias");
        values.get_mut(&name).unwrap().1[WIDTH..2 * WIDTH].fill(0.0);
    }
    values.get_mut("decoder/layer_0/attention/linear_1/bias").unwrap().1[..WIDTH].fill(0.0);
    let plain = super::super::network::tests::ctranslate2(&values);
    let names = Named {
        path: PathBuf::new(),
        source: BufReader::new(File::open("/dev/null").unwrap()),
        style,
        tensors: HashMap::new(),
        heads: [HEADS as u32; 2],
        width: WIDTH,
    };
    let mut all = Vec::new();
    for (name, (dims, numbers)) in &values {
        let parts = names.parts(name);
        assert!(!parts.is_empty(), "{name}");
        for (part, numbers) in parts.iter().zip(numbers.chunks(numbers.len() / parts.len())) {
            let mut dims = dims.clone();
            dims[0] /= parts.len();
            match part {
                Some(part) => all.push((part.clone(), dims, numbers.to_vec())),
                None => assert!(numbers.iter().all(|number| *number == 0.0)),
            }
        }
    }
    all.sort_by(|a, b| a.0.cmp(&b.0));
    (all, plain)
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn safetensors() -> Vec<u8> {
    let (tensors, _) = tensors(Style::HuggingFace);
    let bytes: Vec<Vec<u8>> = tensors.iter().map(|(.., numbers)| bytes_of(numbers)).collect();
    let views = tensors.iter().zip(&bytes).map(|((name, dims, _), bytes)| {
        (name.clone(), safetensors::tensor::TensorView::new(Dtype::F32, dims.clone(), bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

fn ggml() -> Vec<u8> {
    let (tensors, _) = tensors(Style::OpenAi);
    let mut out = MAGIC.to_le_bytes().to_vec();
    let mut put = |number: u32| out.extend(number.to_le_bytes());
    let numbers = [TOKENS, 1500, WIDTH, HEADS, 1, 16, WIDTH, HEADS, 1, 8, 0];
    numbers.iter().for_each(|number| put(*number as u32));
    [1, 1, 0, 2, 1].into_iter().for_each(&mut put);
    out.push(b'a');
    out.extend(2u32.to_le_bytes());
    out.extend(b"bc");
    for (name, dims, numbers) in tensors {
        let conv_bias = name.contains("conv") && dims.len() == 1;
        let dims = if conv_bias { vec![dims[0], 1] } else { dims };
        for number in [dims.len(), name.len(), 0].iter().chain(dims.iter().rev()) {
            out.extend((*number as u32).to_le_bytes());
        }
        out.extend(name.as_bytes());
        out.extend(bytes_of(&numbers));
    }
    out
}

fn stored(bytes: &[u8]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    file
}

fn of_safetensors(bytes: &[u8]) -> Result<Named, Error> {
    Named::safetensors(stored(bytes).path(), [HEADS as u32; 2], WIDTH)
}

fn of_ggml(bytes: &[u8]) -> Result<(Named, Vocabulary), Error> {
    Named::ggml(stored(bytes).path())
}

#[test]
fn each_form_of_a_network_gives_the_same_bits() {
    let (_, plain) = tensors(Style::OpenAi);
    let mut plain = Weights::read(Path::new("model.bin"), Cursor::new(plain)).unwrap();
    let expected = logits_of(&Network::load(&mut plain, 2).unwrap());
    let mut named = of_safetensors(&safetensors()).unwrap();
    assert_eq!(logits_of(&Network::load(&mut named, 2).unwrap()), expected);
    let (mut named, vocabulary) = of_ggml(&ggml()).unwrap();
    assert_eq!(logits_of(&Network::load(&mut named, 2).unwrap()), expected);
    let tokens = vec![b"a".to_vec(), b"bc".to_vec()];
    assert_eq!(vocabulary, Vocabulary { tokens, size: TOKENS as u32 });
}

#[test]
fn the_error_names_the_fault() {
    let error_of = |result: Result<Named, Error>| result.err().map(|error| error.to_string()).unwrap();
    let good = ggml();
    let with = |at: usize, number: u32| {
        let mut bytes = good.clone();
        bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
        error_of(of_ggml(&bytes).map(|(named, _)| named))
    };
    assert!(with(0, 7).contains("begins with 0x7"));
    assert!(with(48, u32::MAX).contains("ends within its filters"));
    assert!(with(60, u32::MAX).contains("its number of tokens is 4294967295"));
    assert!(with(64, 1 << 20).contains("the length of a token is 1048576"));
    // The first tensor: rank, length of its name, type, dimensions.
    assert!(with(75, 9).contains("the number of dimensions of a tensor is 9"));
    assert!(with(83, 2).contains("is of type 2"), "{}", with(83, 2));
    assert!(with(87, u32::MAX).contains("ends within"), "{}", with(87, u32::MAX));
    let cut = error_of(of_ggml(&good[..good.len() - 1]).map(|(named, _)| named));
    assert!(cut.contains("ends within encoder.positional_embedding"), "{cut}");
    let good = safetensors();
    let mut long = good.clone();
    long[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(error_of(of_safetensors(&long)).contains("header has 18446744073709551615 bytes"));
    assert!(error_of(of_safetensors(&good[..good.len() - 1])).contains("ends within"));
    let mut other = of_safetensors(&good).unwrap();
    other.tensors.remove("model.encoder.conv1.weight");
    let missing = Network::load(&mut other, 1).err().unwrap().to_string();
    assert!(missing.contains("it has no model.encoder.conv1.weight"), "{missing}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// A truncated or changed file is read or refused.
    #[test]
    fn whatever_comes_is_read_or_refused(
        cut in 0usize..3000,
        changes in proptest::collection::vec((0usize..3000, any::<u8>()), 0..6),
    ) {
        for good in [ggml(), safetensors()] {
            let mut bytes = good;
            bytes.truncate(if cut % 3 == 0 { cut } else { usize::MAX }.max(16));
            let length = bytes.len();
            for (at, byte) in &changes {
                bytes[at % length] = *byte;
            }
            let _either = of_safetensors(&bytes);
            let _either = of_ggml(&bytes);
        }
    }
}
