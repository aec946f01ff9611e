//! Reference vectors, read from `tests/goldens` or from the folder named by `FLOAT8_GOLDENS`; every size comes from
//! the files.
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};

/// The folder of reference vectors. A relative `FLOAT8_GOLDENS` starts from the workspace's root, where users run cargo;
/// cargo runs tests in the package's folder.
pub fn folder() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    match std::env::var_os("FLOAT8_GOLDENS") {
        Some(path) => package.parent().expect("the package lies in the workspace").join(path),
        None => package.join("goldens"),
    }
}

/// One safetensors file.
pub struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    /// Reads a file of the folder.
    pub fn open(name: &str) -> Self {
        let path = folder().join(name);
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Self { bytes }
    }

    fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).expect("a safetensors file")
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.file().names().into_iter().map(|n| n.to_string()).collect();
        names.sort();
        names
    }

    /// The shape of a tensor.
    pub fn shape(&self, name: &str) -> Vec<usize> {
        self.file().tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).shape().to_vec()
    }

    /// The shape of a matrix.
    pub fn matrix(&self, name: &str) -> [usize; 2] {
        self.shape(name).try_into().unwrap_or_else(|shape| panic!("{name} is no matrix: {shape:?}"))
    }

    /// A float tensor as f32; bf16 widens exactly.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        let file = self.file();
        let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        match tensor.dtype() {
            Dtype::F32 => tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
            Dtype::BF16 => {
                let bits = tensor.data().chunks_exact(2).map(|b| u16::from_le_bytes(b.try_into().unwrap()));
                bits.map(|b| f32::from_bits(u32::from(b) << 16)).collect()
            }
            other => panic!("{name} is {other:?}, not a float tensor"),
        }
    }

    /// FP8 codes.
    pub fn codes(&self, name: &str) -> Vec<u8> {
        let file = self.file();
        let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(tensor.dtype(), Dtype::U8, "{name}");
        tensor.data().to_vec()
    }

    /// Tokens.
    pub fn ints(&self, name: &str) -> Vec<i32> {
        let file = self.file();
        let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(tensor.dtype(), Dtype::I32, "{name}");
        tensor.data().chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
    }
}
