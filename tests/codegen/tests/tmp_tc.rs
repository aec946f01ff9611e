use codegen::device::{GenerateCuda, PaperDevice, take};
use codegen::nvrtc::Nvrtc;
use codegen::sass::Sass;
use cubecl_core::Runtime;
use cubecl_core::ir::{ElemType, FloatKind, StorageType};
use float8_kernels::*;
#[test]
fn tmp() {
    let client = GenerateCuda::client(&PaperDevice::new(100));
    let bf16 = StorageType::Scalar(ElemType::Float(FloatKind::BF16));
    let f32_ = StorageType::Scalar(ElemType::Float(FloatKind::F32));
    let [m, n, k] = [2048usize, 2048, 512];
    for (g, out, acc) in [(Granularity::Tensor, bf16, false), (Granularity::Block1x32, bf16, false), (Granularity::Row, f32_, true)] {
        let op = |rows: usize| Operand {
            codes: client.empty(rows * row_words(k) * 4),
            inv_scale: client.empty(g.scale_words(rows, k) * 4),
            rows, k, format: Format::E4m3, granularity: g,
        };
        let o = Output { handle: client.empty(m * n * out.size()), dtype: out, accumulate: acc };
        println!("{:?}", gemm_path(&client, [g, g], GemmConfig::default()));
        scaled_gemm_into(&client, &op(m), &op(n), None, &o, GemmConfig::default()).unwrap();
    }
    cubecl_common::future::block_on(client.sync()).unwrap();
    let root = std::path::PathBuf::from(std::env::var_os("FLOAT8_CUDA_TOOLS").unwrap());
    let nvrtc = Nvrtc::load(&root).unwrap();
    for (i, kernel) in take().into_iter().enumerate() {
        std::fs::write(format!("/tmp/tc-{i}.cu"), &kernel.source).unwrap();
        let ptx = nvrtc.ptx(&kernel.source, "sm_100a").unwrap();
        std::fs::write(format!("/tmp/tc-{i}.ptx"), ptx).unwrap();
        match nvrtc.compile(&kernel.source, "sm_100a") {
            Ok(cubin) => {
                let file = std::path::PathBuf::from(format!("/tmp/tc-{i}.cubin"));
                std::fs::write(&file, cubin).unwrap();
                let sass = Sass::of(nvrtc.root(), &file).unwrap();
                println!("{} dyn {} {sass:#?}", kernel.name, kernel.dynamic_shared);
            }
            Err(e) => println!("{} {e}", kernel.name),
        }
    }
}
