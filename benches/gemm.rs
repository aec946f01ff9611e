//! The emulated GEMM on wgpu against Burn's f32 matmul of the same shape.
use burn::tensor::{Distribution, Tensor};
use burn_cubecl::CubeBackend;
use cubecl::prelude::*;
use cubecl::wgpu::{WgpuDevice, WgpuRuntime};
use float8_kernels::{GemmConfig, Operand, Orientation, quantize, scaled_gemm};

use crate::medians;
use crate::quantize::{CASTS, cast, matrix, time};
use crate::table::{Table, number};

/// Burn's backend without fusion, which runs a matmul immediately even if its result is unused.
type Plain = CubeBackend<WgpuRuntime, f32, i32, u32>;

/// M, N and K.
const SHAPES: [[usize; 3]; 3] = [[512, 1024, 1024], [1024, 256, 256], [16, 1024, 1024]];

/// Table of the default wgpu device, named `device`. Both operands have the scales of one entry of
/// [`CASTS`].
pub fn table(device: &str, repeat: u32) -> Table {
    let client = WgpuRuntime::client(&WgpuDevice::default());
    let random = |shape: [usize; 2]| Tensor::<Plain, 2>::random(shape, Distribution::Default, &WgpuDevice::default());
    let dtype = f32::as_type_native_unchecked().storage_type();
    let title = format!("emulated GEMM to f32 on {device}, against Burn's matmul of f32");
    let mut table = Table::new(title, &["scales", "M", "N", "K", "emulated ms", "matmul ms", "ratio"]);
    for [m, n, k] in SHAPES {
        let (x, w) = (random([m, k]), random([k, n]));
        for scales in CASTS {
            let operand = |rows| -> Operand {
                let done = quantize(&client, &matrix(&client, [rows, k]), cast(scales), Orientation::Rows);
                done.expect("a matrix that the kernels take").rows.expect("asked for")
            };
            let (a, b) = (operand(m), operand(n));
            let mut emulated = || {
                let config = GemmConfig { emulate: true, ..GemmConfig::default() };
                scaled_gemm(&client, &a, &b, None, dtype, config).expect("operands that fit");
            };
            let mut plain = || drop(x.clone().matmul(w.clone()));
            let [emulated_ms, matmul_ms] =
                medians(repeat, || time(&client, &mut emulated), || time(&client, &mut plain));
            let [emulated, matmul, ratio] = [emulated_ms, matmul_ms, emulated_ms / matmul_ms].map(number);
            table.row([scales.0.into(), m.into(), n.into(), k.into(), emulated, matmul, ratio]);
        }
    }
    table
}
