use super::*;
use crate::test_files::fixture;

#[test]
fn a_fixture_opens() {
    let gguf = Gguf::open(fixture("tiny/llama/llama-f32.gguf")).unwrap();
    assert_eq!(gguf.metadata().require::<&str>("general.architecture").unwrap(), "llama");
    assert_eq!(gguf.tensors().len(), 29);
    let embedding = gguf.tensor("token_embd.weight").unwrap();
    assert_eq!((embedding.ty(), embedding.dims()), (GgmlType::F32, [64, 448].as_slice()));
    assert_eq!(gguf.tensor_data("token_embd.weight").unwrap().len(), 64 * 448 * 4);
}

#[test]
fn a_split_set_is_the_single_file() {
    let single = Gguf::open(fixture("tiny/llama/llama-f32.gguf")).unwrap();
    for number in 1..=3 {
        let path = fixture(&format!("split/llama/llama-split-{number:05}-of-00003.gguf"));
        let set = Gguf::open(path).unwrap();
        assert_eq!(set.files().len(), 3);
        assert_eq!(set.metadata(), single.metadata());
        assert_eq!(set.tensors().len(), single.tensors().len());
        for (a, b) in set.tensors().zip(single.tensors()) {
            assert_eq!((a.name(), a.ty(), a.dims()), (b.name(), b.ty(), b.dims()));
            assert_eq!(set.tensor_data(a.name()).unwrap(), single.tensor_data(b.name()).unwrap());
        }
        assert_eq!(set.digest().unwrap(), single.digest().unwrap());
    }
}
