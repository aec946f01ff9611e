//! The casts in quantize.safetensors and mx.safetensors as a list: inputs, casts and expected
//! results.

use float8_kernels::{Cast, Format, Granularity, InvScale, Scale, ScaleCalculationMode, ScaleMode};
use test_data::{Golden, transpose};

/// One cast by torchao.
pub struct CastVector {
    /// Names of its tensors in the file, with the orientation.
    pub name: String,
    /// Dtype of x: `f32` or `bf16`. The values here are in f32.
    pub dtype: &'static str,
    /// Values of x, row-major.
    pub x: Vec<f32>,
    /// Rows and columns of x.
    pub shape: [usize; 2],
    /// Parameters of the cast.
    pub cast: Cast,
    /// Whether the copy is the transpose, which is contracted over the rows of x.
    pub transposed: bool,
    /// Codes of the copy, row-major.
    pub codes: Vec<u8>,
    /// Inverse scales of the copy.
    pub inv_scales: Vec<InvScale>,
    /// Decoded values, if the file has them.
    pub values: Option<Vec<f32>>,
}

impl CastVector {
    /// Rows and contraction length of the copy.
    pub fn dims(&self) -> [usize; 2] {
        let [rows, cols] = self.shape;
        if self.transposed { [cols, rows] } else { [rows, cols] }
    }
}

/// torchao's names of dtypes.
const DTYPES: [&str; 2] = ["f32", "bf16"];

/// Reads every cast of quantize.safetensors. `rowwise` is the copy by rows, `colwise` the
/// transposed copy, and `tensorwise` both.
pub fn quantize_vectors(golden: &Golden) -> Vec<CastVector> {
    let kinds = [
        ("tensorwise", Granularity::Tensor, &[false, true][..]),
        ("rowwise", Granularity::Row, &[false]),
        ("colwise", Granularity::Row, &[true]),
    ];
    let (mut vectors, mut read) = (vec![], 0);
    for dtype in DTYPES {
        let (x, shape) = (golden.floats(&format!("x_{dtype}")), golden.matrix(&format!("x_{dtype}")));
        for format in Format::ALL {
            for (kind, granularity, orientations) in kinds {
                for (suffix, scale_mode) in [("", ScaleMode::F32), ("_pow2", ScaleMode::PowerOfTwo)] {
                    let name = format!("{dtype}_{format}_{kind}{suffix}");
                    // In the layout of x.
                    let codes = golden.codes(&format!("{name}_codes"));
                    let scales = golden.floats(&format!("{name}_scale"));
                    let inv_scales: Vec<_> = scales.into_iter().map(|scale| Scale::new(scale).inverse()).collect();
                    read += 1;
                    vectors.extend(orientations.iter().map(|&transposed| CastVector {
                        name: format!("{name}{}", if transposed { ", transposed" } else { "" }),
                        dtype,
                        x: x.clone(),
                        shape,
                        cast: Cast { format, granularity, scale_mode },
                        transposed,
                        codes: if transposed { transpose(&codes, shape) } else { codes.clone() },
                        inv_scales: inv_scales.clone(),
                        values: None,
                    }));
                }
            }
        }
    }
    assert_all_read(golden, read);
    vectors
}

/// Reads every cast of mx.safetensors: x by rows, and its transpose by columns, which gives the
/// same.
pub fn mx_vectors(golden: &Golden) -> Vec<CastVector> {
    let (mut vectors, mut read) = (vec![], 0);
    for dtype in DTYPES {
        let (x, shape @ [rows, k]) = (golden.floats(&format!("x_{dtype}")), golden.matrix(&format!("x_{dtype}")));
        let flipped = transpose(&x, shape);
        for (format, mode) in
            Format::ALL.into_iter().flat_map(|format| ScaleCalculationMode::ALL.map(|mode| (format, mode)))
        {
            let name = format!("{dtype}_{format}_{mode}");
            let bytes = golden.codes(&format!("{name}_scale"));
            assert_eq!(bytes.len(), rows * k.div_ceil(32), "{name}");
            read += 1;
            vectors.extend([false, true].map(|transposed| CastVector {
                name: format!("{name}{}", if transposed { ", transposed" } else { "" }),
                dtype,
                x: if transposed { flipped.clone() } else { x.clone() },
                shape: if transposed { [k, rows] } else { shape },
                cast: Cast { format, granularity: Granularity::Block1x32, scale_mode: ScaleMode::E8m0(mode) },
                transposed,
                codes: golden.codes(&format!("{name}_codes")),
                inv_scales: bytes.iter().map(|&byte| InvScale::from_e8m0(byte)).collect(),
                values: Some(golden.floats(&format!("{name}_dequant"))),
            }));
        }
    }
    assert_all_read(golden, read);
    vectors
}

fn assert_all_read(golden: &Golden, read: usize) {
    let in_file = golden.names().iter().filter(|name| name.ends_with("_codes")).count();
    assert_eq!(read, in_file, "every cast in the file");
}
