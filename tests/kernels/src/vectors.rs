//! The casts in cast.safetensors, quantize.safetensors and mx.safetensors as a list: inputs, casts
//! and expected results.

use cubecl::ir::StorageType;
use float8_kernels::{Cast, Format, Granularity, InvScale, Scale, ScaleCalculationMode, ScaleMode, reference};
use test_data::{Golden, transpose};

use crate::Failure;
use crate::data::{BF16, F32};
use crate::matrix::{HostMatrix, MX};

/// Reference files of the casts.
pub struct Goldens {
    /// cast.safetensors
    pub cast: Golden,
    /// quantize.safetensors
    pub quantize: Golden,
    /// mx.safetensors
    pub mx: Golden,
}

/// One cast by torch or torchao.
#[derive(Clone)]
pub struct CastVector {
    /// Kind of the vector, and names of its tensors in the file.
    pub name: String,
    /// Dtype of x. The values here are in f32.
    pub dtype: StorageType,
    /// Values of x, row-major.
    pub x: Vec<f32>,
    /// Rows and columns of x.
    pub shape: [usize; 2],
    /// Parameters of the cast.
    pub cast: Cast,
    /// The amax, if the cast does not compute it.
    pub amax: Option<f32>,
    /// Whether the copy is the transpose, which is contracted over the rows of x.
    pub transposed: bool,
    /// Codes of the copy, row-major, if the file has them.
    pub codes: Option<Vec<u8>>,
    /// Inverse scales of the copy.
    pub inv_scales: Vec<InvScale>,
    /// Decoded values, if the file has them.
    pub values: Option<Vec<f32>>,
}

impl CastVector {
    /// Checks the codes and scales of the copy, bit for bit.
    ///
    /// # Errors
    /// The first difference.
    pub fn check(&self, got: &HostMatrix) -> Result<(), Failure> {
        let [rows, cols] = self.shape;
        let shape = if self.transposed { [cols, rows] } else { [rows, cols] };
        let codes = self.codes.clone().unwrap_or_else(|| got.codes.clone());
        let Cast { format, granularity, .. } = self.cast;
        got.must_be(&HostMatrix { codes, inv_scales: self.inv_scales.clone(), shape, format, granularity })
    }
}

/// torchao's names of dtypes.
const DTYPES: [(&str, StorageType); 2] = [("f32", F32), ("bf16", BF16)];
const MODES: [(&str, ScaleMode); 2] = [("", ScaleMode::F32), ("_pow2", ScaleMode::PowerOfTwo)];

impl Goldens {
    /// Opens the files in [`Golden::folder`].
    pub fn open() -> Self {
        let [cast, quantize, mx] = ["cast", "quantize", "mx"].map(|name| Golden::open(&format!("{name}.safetensors")));
        Self { cast, quantize, mx }
    }

    /// Every cast and every scale in the files.
    ///
    /// # Panics
    /// If a file has other casts.
    pub fn vectors(&self) -> Vec<CastVector> {
        let vectors = [casts(&self.cast), quantized(&self.quantize), mx(&self.mx)];
        for (file, vectors) in [&self.cast, &self.quantize, &self.mx].into_iter().zip(&vectors) {
            let in_file = file.names().iter().filter(|name| name.ends_with("_codes")).count();
            // Tensorwise codes and codes of MX serve both orientations.
            let once = vectors.iter().filter(|vector| !vector.name.ends_with(", transposed")).count();
            assert_eq!(once, in_file, "every cast in the file");
        }
        [vectors.concat(), scales(&self.quantize)].concat()
    }
}

/// Codes in a file. A NaN's code is 0x7f here; the files come from a CPU and keep signs.
fn codes(golden: &Golden, name: &str, format: Format) -> Vec<u8> {
    let canonical = |code| if reference::decode(code, format).is_nan() { 0x7f } else { code };
    golden.codes(&format!("{name}_codes")).into_iter().map(canonical).collect()
}

/// Scales of a file, inverted.
fn inverted(golden: &Golden, name: &str) -> Vec<InvScale> {
    golden.floats(name).into_iter().map(|scale| Scale::new(scale).inverse()).collect()
}

/// Single values, with the amax whose scale is 1.
fn casts(golden: &Golden) -> Vec<CastVector> {
    let inputs = ["bf16", "f32", "f32_small", "edge"];
    let pairs = Format::ALL.into_iter().flat_map(|format| inputs.map(|input| (format, input)));
    let vector = |(format, input): (Format, &str)| {
        let x = golden.floats(&if input == "edge" { format!("{format}_edge_in") } else { format!("{input}_in") });
        CastVector {
            name: format!("golden_cast {format}_{input}"),
            dtype: if input == "bf16" { BF16 } else { F32 },
            shape: [1, x.len()],
            x,
            cast: Cast { format, granularity: Granularity::Tensor, scale_mode: ScaleMode::F32 },
            amax: Some(format.max()),
            transposed: false,
            codes: Some(codes(golden, &format!("{format}_{input}"), format)),
            inv_scales: vec![InvScale::new(1.0)],
            values: None,
        }
    };
    pairs.map(vector).collect()
}

/// Scales of amaxes, each in a row of its own.
fn scales(golden: &Golden) -> Vec<CastVector> {
    let x = golden.floats("amax");
    let vector = |(format, (suffix, scale_mode)): (Format, (&str, ScaleMode))| CastVector {
        name: format!("golden_scale {format}{suffix}"),
        dtype: F32,
        x: x.clone(),
        shape: [x.len(), 1],
        cast: Cast { format, granularity: Granularity::Row, scale_mode },
        amax: None,
        transposed: false,
        codes: None,
        inv_scales: inverted(golden, &format!("{format}_scale{suffix}")),
        values: None,
    };
    Format::ALL.into_iter().flat_map(|format| MODES.map(|mode| (format, mode))).map(vector).collect()
}

/// `rowwise` is the copy by rows, `colwise` the transposed copy, and `tensorwise` both.
fn quantized(golden: &Golden) -> Vec<CastVector> {
    let kinds = [
        ("tensorwise", Granularity::Tensor, &[false, true][..]),
        ("rowwise", Granularity::Row, &[false]),
        ("colwise", Granularity::Row, &[true]),
    ];
    let mut vectors = vec![];
    for ((dtype_name, dtype), format) in DTYPES.into_iter().flat_map(|dtype| Format::ALL.map(|format| (dtype, format)))
    {
        let x = format!("x_{dtype_name}");
        let (x, shape) = (golden.floats(&x), golden.matrix(&x));
        for ((kind, granularity, orientations), (suffix, scale_mode)) in
            kinds.into_iter().flat_map(|kind| MODES.map(|mode| (kind, mode)))
        {
            let name = format!("{dtype_name}_{format}_{kind}{suffix}");
            // In the layout of x.
            let codes = codes(golden, &name, format);
            vectors.extend(orientations.iter().map(|&transposed| CastVector {
                // `colwise` has one orientation, so its name says it.
                name: format!(
                    "golden_codes {name}{}",
                    if transposed && kind == "tensorwise" { ", transposed" } else { "" }
                ),
                dtype,
                x: x.clone(),
                shape,
                cast: Cast { format, granularity, scale_mode },
                amax: None,
                transposed,
                codes: Some(if transposed { transpose(&codes, shape) } else { codes.clone() }),
                inv_scales: inverted(golden, &format!("{name}_scale")),
                values: None,
            }));
        }
    }
    vectors
}

/// x by rows, and its transpose by columns, which gives the same.
fn mx(golden: &Golden) -> Vec<CastVector> {
    let mut vectors = vec![];
    for ((dtype_name, dtype), format) in DTYPES.into_iter().flat_map(|dtype| Format::ALL.map(|format| (dtype, format)))
    {
        let x = format!("x_{dtype_name}");
        let (x, shape @ [rows, k]) = (golden.floats(&x), golden.matrix(&x));
        for (mode, transposed) in ScaleCalculationMode::ALL.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
            let name = format!("{dtype_name}_{format}_{mode}");
            vectors.push(CastVector {
                name: format!("golden_mx {name}{}", if transposed { ", transposed" } else { "" }),
                dtype,
                x: if transposed { transpose(&x, shape) } else { x.clone() },
                shape: if transposed { [k, rows] } else { shape },
                cast: Cast { format, granularity: MX, scale_mode: ScaleMode::E8m0(mode) },
                amax: None,
                transposed,
                codes: Some(codes(golden, &name, format)),
                inv_scales: golden.codes(&format!("{name}_scale")).into_iter().map(InvScale::from_e8m0).collect(),
                values: Some(golden.floats(&format!("{name}_dequant"))),
            });
        }
    }
    vectors
}
