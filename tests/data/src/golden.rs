//! Reference vectors, from `tests/goldens`, from the folder in `FLOAT8_GOLDENS`, or embedded. Sizes
//! come from the files. A missing entry is a panic that names it.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

/// A safetensors file.
pub struct Golden {
    bytes: Cow<'static, [u8]>,
}

impl Golden {
    /// Folder of reference vectors. A relative `FLOAT8_GOLDENS` starts from the workspace's root,
    /// where users run cargo; cargo runs tests in the package's folder.
    pub fn folder() -> PathBuf {
        let tests = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        match std::env::var_os("FLOAT8_GOLDENS") {
            Some(path) => tests.join("..").join(path),
            None => tests.join("goldens"),
        }
    }

    /// Reads a file of the folder.
    pub fn open(name: &str) -> Self {
        let path = Self::folder().join(name);
        let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { bytes: bytes.into() }
    }

    /// Embedded file.
    pub const fn embedded(bytes: &'static [u8]) -> Self {
        Self { bytes: Cow::Borrowed(bytes) }
    }

    fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).expect("a safetensors file")
    }

    fn with<T>(&self, name: &str, take: impl FnOnce(TensorView<'_>) -> T) -> T {
        take(self.file().tensor(name).unwrap_or_else(|error| panic!("{name}: {error}")))
    }

    fn bytes_of(&self, name: &str, dtype: Dtype) -> Vec<u8> {
        self.with(name, |tensor| {
            assert_eq!(tensor.dtype(), dtype, "{name}");
            tensor.data().to_vec()
        })
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.file().names().into_iter().map(|name| name.to_string()).collect();
        names.sort();
        names
    }

    /// Shape of a tensor.
    pub fn shape(&self, name: &str) -> Vec<usize> {
        self.with(name, |tensor| tensor.shape().to_vec())
    }

    /// Shape of a matrix.
    pub fn matrix(&self, name: &str) -> [usize; 2] {
        self.shape(name).try_into().unwrap_or_else(|shape| panic!("{name} is no matrix: {shape:?}"))
    }

    /// Float tensor as f32; bf16 widens exactly.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        self.with(name, |tensor| {
            let data = tensor.data();
            match tensor.dtype() {
                Dtype::F32 => data.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect(),
                Dtype::BF16 => data.chunks_exact(2).map(|x| f32::from_le_bytes([0, 0, x[0], x[1]])).collect(),
                other => panic!("{name} is {other:?}, not a float tensor"),
            }
        })
    }

    /// FP8 codes, or E8M0 scales.
    pub fn codes(&self, name: &str) -> Vec<u8> {
        self.bytes_of(name, Dtype::U8)
    }

    /// Tokens.
    pub fn ints(&self, name: &str) -> Vec<i32> {
        let bytes = self.bytes_of(name, Dtype::I32);
        bytes.chunks_exact(4).map(|x| i32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect()
    }
}
