//! torch's casts and torchao's scales and codes, tensorwise, by rows and by columns, bit for bit, from the golden files.
//!
//! The folder is `tests/goldens` of the workspace, or the one that `FLOAT8_GOLDENS` names.

use std::path::PathBuf;

use cubecl::ir::StorageType;
use float8_kernels::{
    Cast, Format, Granularity, Orientation, Scale, ScaleMode, quantize, quantize_with_amax, reference,
};
use half::bf16;
use rstest::rstest;
use safetensors::{Dtype, SafeTensors};

use crate::common::*;

pub(crate) struct Golden(Vec<u8>);

impl Golden {
    pub(crate) fn open(name: &str) -> Self {
        let folder = std::env::var_os("FLOAT8_GOLDENS")
            .map_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/goldens")), PathBuf::from);
        let path = folder.join(name);
        Self(std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
    }

    fn bytes(&self, name: &str) -> (Vec<u8>, Vec<usize>, Dtype) {
        let file = SafeTensors::deserialize(&self.0).expect("safetensors");
        let tensor = file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        (tensor.data().to_vec(), tensor.shape().to_vec(), tensor.dtype())
    }

    pub(crate) fn u8(&self, name: &str) -> Vec<u8> {
        self.bytes(name).0
    }

    /// An f32 or bf16 tensor as f32, with its shape.
    pub(crate) fn float(&self, name: &str) -> (Vec<f32>, Vec<usize>) {
        let (bytes, shape, dtype) = self.bytes(name);
        let values = match dtype {
            Dtype::F32 => bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect(),
            Dtype::BF16 => bytes.chunks_exact(2).map(|x| bf16::from_le_bytes(x.try_into().unwrap()).to_f32()).collect(),
            other => panic!("{name} is {other:?}"),
        };
        (values, shape)
    }
}

/// Equal, or both NaN: torch's NaN codes may have another sign.
pub(crate) fn assert_codes(got: &[u8], want: &[u8], format: Format, what: &str) {
    assert_eq!(got.len(), want.len());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let nan = |code| reference::decode(code, format).is_nan();
        assert!(got == want || (nan(got) && nan(want)), "{what} {i}: {got:#x}, not {want:#x}");
    }
}

const INPUTS: [(&str, StorageType); 3] = [("bf16", BF16), ("f32", F32), ("f32_small", F32)];

#[rstest]
#[case(Format::E4m3)]
#[case(Format::E5m2)]
fn golden_casts(#[case] format: Format) {
    let golden = Golden::open("cast.safetensors");
    let client = client();
    let edge = format!("{format}_edge");
    let mut cases: Vec<(String, String, StorageType)> =
        INPUTS.map(|(name, dtype)| (format!("{name}_in"), format!("{format}_{name}_codes"), dtype)).into();
    cases.push((format!("{edge}_in"), format!("{edge}_codes"), F32));
    for (input, codes, dtype) in cases {
        let (x, _) = golden.float(&input);
        let want = golden.u8(&codes);
        let mut got = vec![0; x.len()];
        reference::cast(&x, Scale::new(1.0), format, &mut got);
        assert_codes(&got, &want, format, &codes);

        let Some(client) = &client else { continue };
        let view = upload(client, &x, [1, x.len()], Layout::RowMajor, dtype);
        // The amax whose scale is 1.
        let amax = upload_f32(client, &[format.max()]);
        let cast = tensorwise(format, ScaleMode::F32);
        let done = quantize_with_amax(client, &view, &amax, false, cast, Orientation::Rows).unwrap();
        assert_codes(&read_codes(client, &done.rows.unwrap()), &want, format, &codes);
    }
    let (values, _) = golden.float(&format!("{format}_decode"));
    for (code, want) in values.iter().enumerate() {
        let got = reference::decode(code as u8, format);
        assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{code:#x}: {got}, not {want}");
    }
}

#[rstest]
fn golden_scales(
    #[values(Format::E4m3, Format::E5m2)] format: Format,
    #[values(ScaleMode::F32, ScaleMode::PowerOfTwo)] mode: ScaleMode,
) {
    let golden = Golden::open("quantize.safetensors");
    let (amaxes, _) = golden.float("amax");
    let (scales, _) = golden.float(&format!("{format}_scale{}", suffix(mode)));
    for (amax, want) in amaxes.iter().zip(&scales) {
        let got = reference::amax_to_scale(*amax, format, mode).get();
        assert_eq!(got.to_bits(), want.to_bits(), "{format} {mode:?} {amax:e}: {got:e}, not {want:e}");
    }
    let Some(client) = client() else { return };
    let handles = amaxes
        .iter()
        .map(|&amax| {
            let view = upload(&client, &[amax], [1, 1], Layout::RowMajor, F32);
            quantize(&client, &view, tensorwise(format, mode), Orientation::Rows).unwrap().rows.unwrap().inv_scale
        })
        .collect();
    sync(&client);
    for ((got, want), amax) in client.read(handles).iter().zip(&scales).zip(&amaxes) {
        let (got, want) = (f32::from_ne_bytes(got[..4].try_into().unwrap()), Scale::new(*want).inverse().get());
        assert_eq!(got.to_bits(), want.to_bits(), "{format} {mode:?} {amax:e}: {got:e}, not {want:e}");
    }
}

/// The copy by rows against torchao's `rowwise`, the copy by columns against its `colwise`, whose scales are those of the
/// contraction over rows.
#[rstest]
fn golden_codes(
    #[values("f32", "bf16")] dtype: &str,
    #[values(Granularity::Tensor, Granularity::Row)] granularity: Granularity,
    #[values(Format::E4m3, Format::E5m2)] format: Format,
    #[values(ScaleMode::F32, ScaleMode::PowerOfTwo)] mode: ScaleMode,
) {
    let golden = Golden::open("quantize.safetensors");
    let (x, shape) = golden.float(&format!("x_{dtype}"));
    let shape = [shape[0], shape[1]];
    let cast = Cast { format, granularity, scale_mode: mode };
    let names = match granularity {
        Granularity::Tensor => ["tensorwise", "tensorwise"],
        _ => ["rowwise", "colwise"],
    };
    let device = client().map(|client| {
        let view = upload(&client, &x, shape, Layout::RowMajor, if dtype == "f32" { F32 } else { BF16 });
        let done = quantize(&client, &view, cast, Orientation::Both).unwrap();
        [done.rows, done.cols].map(|operand| HostMatrix::read(&client, &operand.unwrap()))
    });
    for (transposed, name) in [false, true].into_iter().zip(names) {
        let name = format!("{dtype}_{format}_{name}{}", suffix(mode));
        let want = golden.u8(&format!("{name}_codes"));
        let want_scales = golden.float(&format!("{name}_scale")).0;

        let got = reference::quantize(&x, shape[0], shape[1], cast, transposed);
        let scales: Vec<f32> = got.scales.iter().map(|scale| scale.get()).collect();
        assert_eq!(scales, want_scales, "{name}");
        assert_codes(&got.codes, &want, format, &name);

        let Some(device) = &device else { continue };
        let got = &device[usize::from(transposed)];
        let want_inverses: Vec<_> = want_scales.iter().map(|&scale| Scale::new(scale).inverse()).collect();
        assert_eq!(got.inv_scales, want_inverses, "{name}");
        let want = if transposed { transpose(&want, shape) } else { want };
        assert_codes(&got.codes, &want, format, &name);
    }
}

fn suffix(mode: ScaleMode) -> &'static str {
    match mode {
        ScaleMode::F32 => "",
        ScaleMode::PowerOfTwo => "_pow2",
        ScaleMode::E8m0(_) => unreachable!("in a file of its own"),
    }
}
