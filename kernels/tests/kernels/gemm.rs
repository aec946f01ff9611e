//! The scaled GEMM against f64, within the bound of f32 summation.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use float8_kernels::reference::HostOperand;
use float8_kernels::{Format, GemmPath, InvScale, Operand, gemm_path, reference, scaled_gemm, supports};
use half::{bf16, f16};
use rstest::rstest;

use crate::common::*;

/// A random operand on the host and on the device.
struct Case {
    codes: Vec<u8>,
    device: Operand,
    inv_scale: f32,
}

impl Case {
    /// Any finite codes, so sums that cancel.
    fn new(client: &Client, shape: [usize; 2], format: Format, inv_scale: f32, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let codes: Vec<u8> = (0..shape[0] * shape[1])
            .map(|_| reference::encode(random.unit() * (random.unit() * 6.0).exp2(), format))
            .collect();
        Self { device: upload_codes(client, &codes, shape, format, inv_scale), codes, inv_scale }
    }

    fn host(&self) -> HostOperand<'_> {
        let &Operand { rows, k, format, .. } = &self.device;
        HostOperand { codes: &self.codes, rows, k, format, inv_scale: InvScale::new(self.inv_scale) }
    }

    fn magnitudes(&self) -> Vec<u8> {
        self.codes.iter().map(|code| code & 0x7f).collect()
    }
}

/// Elements of `out` as f32.
fn read_out(client: &Client, handle: cubecl::server::Handle, dtype: StorageType) -> Vec<f32> {
    sync(client);
    let bytes = client.read_one(handle).unwrap();
    if dtype == F16 {
        f16::from_bytes(&bytes).iter().map(|x| x.to_f32()).collect()
    } else if dtype == BF16 {
        bf16::from_bytes(&bytes).iter().map(|x| x.to_f32()).collect()
    } else {
        f32::from_bytes(&bytes).to_vec()
    }
}

/// |got - exact| ≤ (k + 4) · 2^-24 · (Σ|a·b|·inv + |bias|), the summation bound with one rounding for each of the scales'
/// product, scaling, bias and result.
fn check(client: &Client, a: &Case, b: &Case, bias: Option<(&[f32], usize, StorageType)>) {
    let k = a.device.k;
    let bias = bias.map(|(x, stride, dtype)| (to_dtype(x, dtype).1, upload_vector(client, x, stride, dtype)));
    let host_bias = bias.as_ref().map(|(x, _)| x.as_slice());
    let out = scaled_gemm(client, &a.device, &b.device, bias.as_ref().map(|(_, view)| view), F32).unwrap();
    let got = read_out(client, out, F32);
    let want = reference::scaled_gemm_f64(&a.host(), &b.host(), host_bias);
    let (abs_a, abs_b) = (a.magnitudes(), b.magnitudes());
    let abs_bias = host_bias.map(|bias| bias.iter().map(|x| x.abs()).collect::<Vec<_>>());
    let size = reference::scaled_gemm_f64(
        &HostOperand { codes: &abs_a, ..a.host() },
        &HostOperand { codes: &abs_b, ..b.host() },
        abs_bias.as_deref(),
    );
    assert_eq!(got.len(), want.len());
    for (i, ((&got, want), size)) in got.iter().zip(want).zip(size).enumerate() {
        let bound = (k + 4) as f64 * 2f64.powi(-24) * size;
        let error = (f64::from(got) - want).abs();
        assert!(error <= bound, "element {i}: {got}, not {want}: error {error:e} above {bound:e}");
    }
}

#[rstest]
fn within_the_bound_of_f32_sums(
    #[values([1, 1, 1], [1, 1, 1000], [3, 5, 17], [17, 33, 16], [64, 64, 64], [100, 70, 36], [65, 129, 15], [128, 1, 33], [1, 200, 100], [130, 67, 300])]
    shape: [usize; 3],
    #[values(Format::E4m3, Format::E5m2)] format_a: Format,
    #[values(Format::E4m3, Format::E5m2)] format_b: Format,
) {
    let [m, n, k] = shape;
    let Some(client) = client() else { return };
    let a = Case::new(&client, [m, k], format_a, 0.0371, 31);
    let b = Case::new(&client, [n, k], format_b, 1.7e-3, 32);
    check(&client, &a, &b, None);
}

#[rstest]
fn bias_of_any_dtype_and_stride(#[values(F32, F16, BF16)] dtype: StorageType, #[values(1, 2, 3)] stride: usize) {
    let Some(client) = client() else { return };
    for n in [1, 70] {
        let a = Case::new(&client, [33, 48], Format::E4m3, 0.01, 33);
        let b = Case::new(&client, [n, 48], Format::E5m2, 0.1, 34);
        check(&client, &a, &b, Some((&Random::new(35).values(n), stride, dtype)));
    }
}

/// 16-bit outputs are the f32 outputs rounded once, to nearest even.
#[rstest]
fn half_outputs_are_rounded_once(#[values(F16, BF16)] dtype: StorageType) {
    let Some(client) = client() else { return };
    if !supports(&client, dtype) {
        eprintln!("skipped: the device has no {dtype}");
        return;
    }
    let a = Case::new(&client, [33, 48], Format::E4m3, 0.01, 36);
    let b = Case::new(&client, [70, 48], Format::E4m3, 0.1, 37);
    let bias = upload_vector(&client, &Random::new(38).values(70), 1, F32);
    let [full, half] = [F32, dtype]
        .map(|dtype| read_out(&client, scaled_gemm(&client, &a.device, &b.device, Some(&bias), dtype).unwrap(), dtype));
    assert_eq!(half, to_dtype(&full, dtype).1);
}

/// A NaN code reaches exactly the outputs of its row (of A) or column (of B).
#[test]
fn nan_reaches_the_output() {
    let Some(client) = client() else { return };
    let (m, n, k) = (20, 30, 50);
    for left in [true, false] {
        let mut a = Case::new(&client, [m, k], Format::E4m3, 1.0, 39);
        let mut b = Case::new(&client, [n, k], Format::E5m2, 1.0, 40);
        if left {
            a.codes[7 * k + 49] = 0xff;
            a.device = upload_codes(&client, &a.codes, [m, k], Format::E4m3, 1.0);
        } else {
            b.codes[7 * k + 49] = 0x7f;
            b.device = upload_codes(&client, &b.codes, [n, k], Format::E5m2, 1.0);
        }
        let out = read_f32(&client, scaled_gemm(&client, &a.device, &b.device, None, F32).unwrap());
        for (i, x) in out.iter().enumerate() {
            assert_eq!(x.is_nan(), if left { i / n == 7 } else { i % n == 7 }, "element {i}");
        }
    }
}

/// A NaN scale reaches every output.
#[test]
fn nan_scale_reaches_every_output() {
    let Some(client) = client() else { return };
    let a = Case::new(&client, [5, 20], Format::E4m3, f32::NAN, 41);
    let b = Case::new(&client, [6, 20], Format::E4m3, 1.0, 42);
    let out = read_f32(&client, scaled_gemm(&client, &a.device, &b.device, None, F32).unwrap());
    assert!(out.iter().all(|x| x.is_nan()));
}

#[test]
fn the_path_is_reported() {
    let Some(client) = client() else { return };
    assert_eq!(gemm_path(&client), GemmPath::Emulated);
    assert_eq!(gemm_path(&client).to_string(), "emulated");
}
