use super::*;
use proptest::prelude::*;
use std::io::Write;
use tempfile::NamedTempFile;

/// Writes pickles as `torch.save` does.
#[derive(Default)]
struct Pickler(Vec<u8>);

impl Pickler {
    fn op(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn text(self, text: &str) -> Self {
        self.op(b"X").op(&(text.len() as u32).to_le_bytes()).op(text.as_bytes())
    }

    fn int(self, value: i32) -> Self {
        self.op(b"J").op(&value.to_le_bytes())
    }

    fn ints(self, values: &[i32]) -> Self {
        values.iter().fold(self.op(b"("), |pickle, value| pickle.int(*value)).op(b"t")
    }

    fn tensor(
        self,
        class: &str,
        key: &str,
        elements: i32,
        offset: i32,
        shape: &[i32],
        strides: &[i32],
    ) -> Self {
        self.op(b"ctorch._utils\n_rebuild_tensor_v2\n((")
            .text("storage")
            .op(format!("ctorch\n{class}\n").as_bytes())
            .text(key)
            .text("cpu")
            .int(elements)
            .op(b"tQ")
            .int(offset)
            .ints(shape)
            .ints(strides)
            .op(b"\x89ccollections\nOrderedDict\n)RtR")
    }

    fn file(self) -> Vec<u8> {
        [b"\x80\x02", self.0.as_slice(), b"."].concat()
    }
}

/// `{"state": OrderedDict(w=.., turned=.., half=.., ids=..), "epoch": 3}` with an object of a class in between
/// that this process does not have.
fn object() -> Vec<u8> {
    let state = Pickler::default()
        .op(b"}(")
        .text("state")
        .op(b"ccollections\nOrderedDict\n)R(")
        .text("w")
        .tensor("FloatStorage", "0", 6, 0, &[2, 3], &[3, 1])
        .text("turned")
        .tensor("FloatStorage", "0", 6, 0, &[3, 2], &[1, 3])
        .text("half")
        .tensor("HalfStorage", "1", 2, 1, &[1], &[1])
        .text("ids")
        .tensor("LongStorage", "2", 1, 0, &[], &[])
        .op(b"u}");
    state
        .text("attribute")
        .int(1)
        .op(b"sb")
        .text("task")
        .op(b"cposix\nsystem\n(X\x04\x00\x00\x00truetR")
        .text("epoch")
        .op(b"K\x03u")
        .file()
}

fn storages() -> [(&'static str, u64, Vec<u8>); 3] {
    let floats: Vec<u8> = (0..6).flat_map(|value| (value as f32 + 0.5).to_le_bytes()).collect();
    let halves: Vec<u8> = [1.0, -2.0].iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect();
    [("0", 6, floats), ("1", 2, halves), ("2", 1, (-7i64).to_le_bytes().to_vec())]
}

fn archive(members: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, bytes) in members {
        let at = file.len() as u32;
        let size = (bytes.len() as u32).to_le_bytes();
        let common = [&[0u8; 14][..], &size, &size, &(name.len() as u16).to_le_bytes()].concat();
        file.extend([b"PK\x03\x04", common.as_slice(), &[0, 0], name.as_bytes(), bytes].concat());
        directory.extend(
            [b"PK\x01\x02\0\0", common.as_slice(), &[0; 12], &at.to_le_bytes(), name.as_bytes()].concat(),
        );
    }
    let (at, len) = (file.len() as u32, directory.len() as u32);
    file.extend(directory);
    file.extend([b"PK\x05\x06", &[0; 8][..], &len.to_le_bytes(), &at.to_le_bytes(), &[0; 2]].concat());
    file
}

fn zipped() -> Vec<u8> {
    let object = object();
    let [zero, one, two] = storages().map(|(_, _, bytes)| bytes);
    archive(&[
        ("m/data.pkl", &object),
        ("m/byteorder", b"little"),
        ("m/data/0", &zero),
        ("m/data/1", &one),
        ("m/data/2", &two),
        ("m/version", b"3\n"),
    ])
}

fn sequence() -> Vec<u8> {
    let mut file = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.".to_vec();
    file.extend(Pickler::default().op(b"}").text("little_endian").op(b"\x88s").file());
    file.extend(object());
    let keys = storages().iter().fold(Pickler::default().op(b"]("), |pickle, (key, ..)| pickle.text(key));
    file.extend(keys.op(b"e").file());
    for (_, count, bytes) in storages() {
        file.extend(count.to_le_bytes());
        file.extend(bytes);
    }
    file
}

fn open(bytes: &[u8]) -> Result<TorchFile, String> {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    TorchFile::open(file.path()).map_err(|error| error.to_string())
}

#[test]
fn both_layouts_are_read_and_nothing_is_called() {
    for bytes in [zipped(), sequence()] {
        let file = open(&bytes).unwrap();
        let names: Vec<_> = file.names().collect();
        assert_eq!(names, ["state.half", "state.ids", "state.turned", "state.w"]);
        assert_eq!(file.shape("state.w"), Some(&[2, 3][..]));
        assert_eq!(file.floats("state.w", &[2, 3]).unwrap(), [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]);
        assert_eq!(file.floats("state.turned", &[3, 2]).unwrap(), [0.5, 3.5, 1.5, 4.5, 2.5, 5.5]);
        assert_eq!(file.floats("state.half", &[1]).unwrap(), [-2.0]);
        assert_eq!(file.integers("state.ids", &[]).unwrap(), [-7]);
        let fault = |result: Result<Vec<f32>, Error>| result.unwrap_err().to_string();
        assert!(fault(file.floats("state.w", &[3, 2])).contains("has shape [2, 3], it must be [3, 2]"));
        assert!(fault(file.floats("state.ids", &[])).contains("type I64"));
        assert!(fault(file.floats("w", &[2, 3])).contains("there is no tensor w"));
    }
}

#[test]
fn tensors_outside_their_storage_are_refused() {
    let dims = [(7, 0, 1), (1 << 30, 0, 0), (2, 5, 1), (2, 0, i32::MAX), (1, i32::MAX, 1)];
    for (dim, offset, stride) in dims {
        let tensor = Pickler::default()
            .op(b"}")
            .text("w")
            .tensor("FloatStorage", "0", 6, offset, &[dim], &[stride])
            .op(b"s");
        let file = open(&archive(&[("m/data.pkl", &tensor.file()), ("m/data/0", &[0; 24])])).unwrap();
        let error = file.floats("w", &[dim as usize]).unwrap_err().to_string();
        assert!(error.contains("exceed its storage of 24 bytes"), "{error}");
    }
}

#[test]
fn values_that_are_not_finite_are_refused() {
    let tensor = Pickler::default().op(b"}").text("w").tensor("FloatStorage", "0", 1, 0, &[1], &[1]).op(b"s");
    let nan = f32::NAN.to_le_bytes();
    let file = open(&archive(&[("m/data.pkl", &tensor.file()), ("m/data/0", &nan)])).unwrap();
    assert!(file.floats("w", &[1]).unwrap_err().to_string().contains("value 0 is not finite"));
}

#[test]
fn instructions_and_sizes_beyond_the_limits_are_refused_by_name() {
    let fault = |pickle: Vec<u8>| open(&archive(&[("m/data.pkl", &pickle)])).unwrap_err();
    // INST of protocol 0 and an EXT1 of protocol 2.
    assert!(fault(Pickler::default().op(b"(ios\nsystem\n").file()).contains("instruction 0x69"));
    assert!(fault(Pickler::default().op(b"\x82\x01").file()).contains("instruction 0x82"));
    assert!(fault(b"\x80\x04N.".to_vec()).contains("protocol is 4, it must be 2"));
    assert!(fault(Pickler::default().op(&vec![b'N'; pickle::MAX_VALUES + 1]).file()).contains("values"));
    assert!(fault(Pickler::default().file()).contains("ends without a value"));
    assert!(fault(Pickler::default().op(b"(0").file()).contains("instruction"));
    assert!(fault(Pickler::default().op(b"N(s").file()).contains("the stack is empty"));
    assert!(fault(b"\x80\x02X\xff\xff\xff\xff".to_vec()).contains("it ends"));
    // A dictionary in itself, and dictionaries with many paths to the same one.
    assert!(
        fault(Pickler::default().op(b"}q\x01").text("a").op(b"h\x01s").file()).contains("more than 8 deep")
    );
    let wide = (0..7).fold(Pickler::default().op(b"}"), |pickle, level: u8| {
        let pickle = pickle.op(&[b'q', level, b'}', b'(']);
        (0..32).fold(pickle, |pickle, key| pickle.int(key).op(&[b'h', level])).op(b"u")
    });
    assert!(fault(wide.file()).contains("refer to each other too often"));
}

proptest! {
    #[test]
    fn damaged_files_are_refused_or_read(
        sequential: bool, changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4), cut: Option<prop::sample::Index>,
    ) {
        let mut bytes = if sequential { sequence() } else { zipped() };
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(file) = open(&bytes) {
            for name in file.names() {
                let shape = file.shape(name).unwrap();
                let count = shape.iter().product::<usize>();
                if let Ok(values) = file.floats(name, shape) {
                    prop_assert!(values.len() == count && count <= bytes.len());
                }
            }
        }
    }
}
