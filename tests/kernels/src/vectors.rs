//! The casts in cast.safetensors, quantize.safetensors and mx.safetensors as a list: inputs, casts
//! and expected results.

use cubecl::ir::StorageType;
use float8_kernels::{Cast, Format, Granularity, InvScale, Scale, ScaleCalculationMode, ScaleMode, reference};
use test_data::{Golden, transpose};

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
    /// Parameters of the cast.
    pub cast: Cast,
    /// The amax, if the cast does not compute it.
    pub amax: Option<f32>,
    /// Whether the copy is the transpose, which is contracted over the rows of x.
    pub transposed: bool,
    /// Codes and inverse scales of the copy.
    pub want: HostMatrix,
    /// Decoded values, if the file has them.
    pub values: Option<Vec<f32>>,
}

impl CastVector {
    /// Rows and columns of x.
    pub fn shape(&self) -> [usize; 2] {
        flipped(self.want.shape, self.transposed)
    }
}

const fn flipped([rows, cols]: [usize; 2], transposed: bool) -> [usize; 2] {
    if transposed { [cols, rows] } else { [rows, cols] }
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

/// torchao's names of inputs, with their dtypes, and formats of their casts.
fn inputs() -> impl Iterator<Item = (&'static str, StorageType, Format)> {
    DTYPES.into_iter().flat_map(|(name, dtype)| Format::ALL.map(|format| (name, dtype, format)))
}

/// Single values, with the amax whose scale is 1.
fn casts(golden: &Golden) -> Vec<CastVector> {
    let inputs = ["bf16", "f32", "f32_small", "edge"];
    let pairs = Format::ALL.into_iter().flat_map(|format| inputs.map(|input| (format, input)));
    let vector = |(format, input): (Format, &str)| {
        let x = golden.floats(&if input == "edge" { format!("{format}_edge_in") } else { format!("{input}_in") });
        let cast = Cast { format, granularity: Granularity::Tensor, scale_mode: ScaleMode::F32 };
        let codes = codes(golden, &format!("{format}_{input}"), format);
        CastVector {
            name: format!("golden_cast {format}_{input}"),
            dtype: if input == "bf16" { BF16 } else { F32 },
            cast,
            amax: Some(format.max()),
            transposed: false,
            want: HostMatrix { codes, ..HostMatrix::identity([1, x.len()], format, cast.granularity) },
            values: None,
            x,
        }
    };
    pairs.map(vector).collect()
}

/// Scales of amaxes, each in a row of its own. The file has no codes.
fn scales(golden: &Golden) -> Vec<CastVector> {
    let x = golden.floats("amax");
    let vector = |(format, (suffix, scale_mode)): (Format, (&str, ScaleMode))| {
        let cast = Cast { format, granularity: Granularity::Row, scale_mode };
        let inv_scales = inverted(golden, &format!("{format}_scale{suffix}"));
        CastVector {
            name: format!("golden_scale {format}{suffix}"),
            dtype: F32,
            x: x.clone(),
            cast,
            amax: None,
            transposed: false,
            want: HostMatrix { inv_scales, ..HostMatrix::cast(&x, [x.len(), 1], cast) },
            values: None,
        }
    };
    Format::ALL.into_iter().flat_map(|format| MODES.map(|mode| (format, mode))).map(vector).collect()
}

/// `rowwise` is the copy by rows, `colwise` the transposed copy, and `tensorwise` both.
fn quantized(golden: &Golden) -> Vec<CastVector> {
    let kinds = [
        ("tensorwise", Granularity::Tensor, false),
        ("tensorwise", Granularity::Tensor, true),
        ("rowwise", Granularity::Row, false),
        ("colwise", Granularity::Row, true),
    ];
    let mut vectors = vec![];
    for (input, dtype, format) in inputs() {
        let x = golden.floats(&format!("x_{input}"));
        for ((kind, granularity, transposed), (suffix, scale_mode)) in
            kinds.into_iter().flat_map(|kind| MODES.map(|mode| (kind, mode)))
        {
            let name = format!("{input}_{format}_{kind}{suffix}");
            // In the layout of x.
            let (mut codes, shape) = (codes(golden, &name, format), golden.matrix(&format!("x_{input}")));
            if transposed {
                codes = transpose(&codes, shape);
            }
            let (inv_scales, shape) = (inverted(golden, &format!("{name}_scale")), flipped(shape, transposed));
            // `colwise` has one orientation, so its name says it.
            let which = if transposed && kind == "tensorwise" { ", transposed" } else { "" };
            vectors.push(CastVector {
                name: format!("golden_codes {name}{which}"),
                dtype,
                x: x.clone(),
                cast: Cast { format, granularity, scale_mode },
                amax: None,
                transposed,
                want: HostMatrix { codes, inv_scales, shape, format, granularity },
                values: None,
            });
        }
    }
    vectors
}

/// x by rows, and its transpose by columns, which gives the same.
fn mx(golden: &Golden) -> Vec<CastVector> {
    let mut vectors = vec![];
    for (input, dtype, format) in inputs() {
        let (x, shape) = (golden.floats(&format!("x_{input}")), golden.matrix(&format!("x_{input}")));
        for (mode, transposed) in ScaleCalculationMode::ALL.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
            let name = format!("{input}_{format}_{mode}");
            let codes = codes(golden, &name, format);
            let inv_scales = golden.codes(&format!("{name}_scale")).into_iter().map(InvScale::from_e8m0).collect();
            vectors.push(CastVector {
                name: format!("golden_mx {name}{}", if transposed { ", transposed" } else { "" }),
                dtype,
                x: if transposed { transpose(&x, shape) } else { x.clone() },
                cast: Cast { format, granularity: MX, scale_mode: ScaleMode::E8m0(mode) },
                amax: None,
                transposed,
                want: HostMatrix { codes, inv_scales, shape, format, granularity: MX },
                values: Some(golden.floats(&format!("{name}_dequant"))),
            });
        }
    }
    vectors
}
