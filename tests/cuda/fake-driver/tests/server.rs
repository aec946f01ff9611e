//! CubeCL's CUDA server on the driver: what it learns of a device, copies, streams, every kernel
//! of this project, linears, and errors.

mod common;

use burn::backend::{Cuda, Flex};
use burn::tensor::backend::Backend;
use burn::tensor::{ElementConversion, Int, Tensor, TensorData};
use codegen::device::{GenerateCuda, OfflineDevice, execute_shared};
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::*;
use cubecl::server::CopyDescriptor;
use fake_cuda::{Driver, Fault};
use float8_kernels::{
    Cast, CudaArch, Format, GemmPath, Granularity, MatrixView, Operand, Orientation, ScaleMode, cuda_arch, gemm_path,
    quantize, scaled_gemm,
};
use kernel_tests::{Case, F32, Failure, Gemm, HostMatrix, PRECISE, Size, caught, visit, visit_linears};
use models::{CausalLmExt, Decoder, DecoderConfig};

/// Devices of this process: an H200, a B200, an RTX 5090, one device for each fault, a B300 and a
/// GB10.
const DEVICES: &str = "90,100,120,90,90,90,90,103,121";

fn client(index: usize) -> Option<(ComputeClient<CudaRuntime>, &'static Driver)> {
    common::driver(DEVICES).map(|driver| (CudaRuntime::client(&CudaDevice::new(index)), driver))
}

/// The offline devices of `codegen` have the properties that CubeCL's server learns of the driver.
#[test]
fn properties() {
    for (index, arch, sm, sms) in [
        (0, CudaArch::Sm90, 90, 132),
        (1, CudaArch::Sm100, 100, 148),
        (2, CudaArch::Sm120, 120, 170),
        (7, CudaArch::Sm100, 103, 148),
        (8, CudaArch::Sm120, 121, 48),
    ] {
        let Some((client, _)) = client(index) else { return };
        let offline = GenerateCuda::client(&OfflineDevice { sm, sms });
        let mut properties = offline.properties().clone();
        // A quarter of the device's memory.
        properties.memory.max_page_size = client.properties().memory.max_page_size;
        assert_eq!(*client.properties(), properties, "sm_{sm}");
        assert_eq!((cuda_arch(&client), cuda_arch(&offline)), (Some(arch), Some(arch)));
    }
}

/// GEMMs, and a cast of rows with gaps between them, have the same bits in CubeCL's server and in the
/// one of `codegen`, which orders arguments and reads tensor maps too.
#[test]
fn servers_agree() {
    fn results<R: Runtime>(client: &ComputeClient<R>) -> Vec<Vec<u8>> {
        let product = |granularities| {
            let gemm = Gemm { granularities, ..Gemm::new([70, 133, 200]) };
            let [a, b] = gemm.matrices().map(|matrix| matrix.upload(client));
            scaled_gemm(client, &a, &b, None, F32, PRECISE).expect("operands that fit")
        };
        let values: Vec<u8> = (0..35 * 160).flat_map(|i| (i as f32).sin().to_le_bytes()).collect();
        let handle = client.create_from_slice(&values);
        let x = MatrixView { handle, shape: [35, 150], strides: [160, 1], dtype: F32 };
        let cast = Cast { format: Format::E4m3, granularity: Granularity::Row, scale_mode: ScaleMode::F32 };
        let copies = quantize(client, &x, cast, Orientation::Both).expect("a matrix that fits");
        let copies = [copies.rows, copies.cols].map(|copy| copy.expect("both were asked for").codes);
        let products = [[Granularity::Tensor; 2], [Granularity::Row; 2], [Granularity::Block1x32; 2]].map(product);
        products.into_iter().chain(copies).map(|handle| client.read_one_unchecked(handle).to_vec()).collect()
    }
    let Some(_running) = execute_shared() else { return };
    for (index, sm, sms) in [(0, 90, 132), (1, 100, 148), (2, 120, 170)] {
        let Some((client, _)) = client(index) else { return };
        assert_eq!(results(&client), results(&GenerateCuda::client(&OfflineDevice { sm, sms })), "sm_{sm}");
    }
}

/// Copies of rows of every length, flat and pitched, to and from the device.
#[test]
fn copies() {
    let Some((client, _)) = client(0) else { return };
    for shape in [vec![1], vec![1000], vec![3, 5], vec![7, 512], vec![2, 3, 129], vec![1, 1, 1, 70_000]] {
        let len = shape.iter().product::<usize>();
        let data: Vec<u8> = (0..len * 2).map(|i| (i % 251) as u8).collect();
        let layout = client.create_tensor_from_slice(&data, shape.clone().into(), 2);
        let descriptor = CopyDescriptor::new(layout.memory.clone().binding(), shape.clone().into(), layout.strides, 2);
        assert_eq!(client.read_one_unchecked_tensor(descriptor).to_vec(), data, "{shape:?}");
        assert_eq!(client.read_one_unchecked(client.create_from_slice(&data)).to_vec(), data, "{shape:?}");
    }
}

/// Memory that one stream writes and the next one reads: each thread has a stream of its own.
#[test]
fn streams() {
    let Some((client, _)) = client(0) else { return };
    let mut handle = client.create_from_slice(&[0; 4096]);
    for stream in 1..=10u8 {
        let (client, last) = (client.clone(), handle);
        let next = std::thread::spawn(move || {
            assert_eq!(client.read_one_unchecked(last).to_vec(), [stream - 1; 4096]);
            client.create_from_slice(&[stream; 4096])
        });
        handle = next.join().expect("the memory is the last stream's");
    }
}

/// A GEMM of operands that other streams have written has the bits of a GEMM on their stream. The
/// server waits for the streams of a launch's arrays, not of its tensor maps.
#[test]
fn streams_of_a_gemm() {
    for index in [0, 1] {
        let Some((client, _)) = client(index) else { return };
        let [a, b] = Gemm::new([70, 133, 200]).matrices();
        let on_other_streams = || {
            let upload = |matrix: &HostMatrix| {
                std::thread::scope(|scope| scope.spawn(|| matrix.upload(&client)).join().expect("no panic"))
            };
            [upload(&a), upload(&b)]
        };
        let product = |[a, b]: [Operand; 2]| {
            let product = scaled_gemm(&client, &a, &b, None, F32, PRECISE).expect("operands that fit");
            client.read_one_unchecked(product).to_vec()
        };
        let (other, own) = (product(on_other_streams()), product([&a, &b].map(|matrix| matrix.upload(&client))));
        assert_eq!(other, own);
    }
}

/// Runs the first case that begins and ends with each of these texts, on a device.
fn all_pass(index: usize, wanted: &[[&str; 2]]) {
    let Some((client, _)) = client(index) else { return };
    let mut left = wanted.to_vec();
    let mut visitor = |case: Case<'_>| {
        let name = case.name.clone();
        if let Some(at) = left.iter().position(|[start, end]| name.starts_with(start) && name.ends_with(end)) {
            left.remove(at);
            match case.run() {
                Ok(worst) => assert!((0.0..=1.0).contains(&worst), "{name}: {worst}"),
                Err(failure) => panic!("{name}: {failure}"),
            }
        }
    };
    visit(&client, Size::Small, &mut visitor);
    // Burn's backend has the first device.
    if index == 0 {
        visit_linears::<Cuda>(Size::Small, &mut visitor);
    }
    assert!(left.is_empty(), "no cases {left:?}");
}

#[test]
fn casts() {
    all_pass(
        0,
        &[
            ["quantize 35x150 f32", "e4m3 tensorwise F32 Both"],
            ["quantize 35x150 bf16", "e4m3 rowwise PowerOfTwo Both"],
            ["quantize 35x150 f16", "e5m2 1x128 F32 Both"],
            ["quantize 35x150 bf16", "e5m2 128x128 F32 Both"],
            ["quantize 35x150 f32", "1x32 E8m0(Rceil) Both"],
            ["quantize 35x150 f32", "e4m3 1x32 E8m0Square(Rceil) Both"],
            ["quantize_with_amax 70x133 bf16", "Cols observed"],
            ["amax 70x133 f32 pitched", "values"],
            ["scale e4m3 1x32", "Rows"],
            ["encode bf16", "e5m2"],
            ["transpose 129x", ""],
            ["dequantize_to_f32 128x128", "rowwise"],
            ["dequantize_mx 129x160", "e4m3"],
            ["health 37x140", "e4m3 1x128 F32"],
        ],
    );
}

#[test]
fn operations_beside_linears() {
    all_pass(0, &[["swiglu 2x4101 f16", ""], ["rms_norm 2x4101 bf16", "by bf16"], ["rotary 2x5x4x64 bf16", ""]]);
    all_pass(0, &[["adamw f32 bf16 rounded", ""], ["adamw bf16 f32", ""]]);
}

/// Forward and gradients. Other runtimes of these tests lack 16-bit dtypes.
#[test]
fn attention() {
    all_pass(
        0,
        &[
            ["attention more_keys f32", "tiles"],
            ["attention documents bf16", " wgmma"],
            ["attention documents bf16", " mma"],
            ["attention mask_of_keys f16", "tiles"],
            ["attention few f16", " mma"],
        ],
    );
    all_pass(2, &[["attention wide bf16", " mma"], ["attention odd f16", "tiles"]]);
}

#[test]
fn gemms_of_hopper() {
    all_pass(
        0,
        &[
            ["scaled_gemm 70x133x200 e4m3,e5m2 tensorwise,tensorwise random", "wgmma"],
            ["scaled_gemm ", "1x128,128x128 random f32 wgmma"],
            ["scaled_gemm ", "1x32,1x32 random f32 bf16 wgmma"],
            ["scaled_gemm 4x", "gemv"],
            ["scaled_gemm 17x33x16", "emulated"],
            ["matmul_halves 70x133x200 xᵀ w", ""],
            ["matmul_halves 300x520x130 x w f16", ""],
            ["grouped_gemm rows 0+70", "rowwise,rowwise random f32 wgmma fast"],
            ["grouped_gemm contraction 0+70", "tensorwise,rowwise random f32 wgmma"],
        ],
    );
}

#[test]
fn gemms_of_blackwell() {
    all_pass(
        1,
        &[
            ["scaled_gemm 70x133x200 e4m3,e5m2 tensorwise,tensorwise random", "tcgen05"],
            ["scaled_gemm ", "1x32,1x32 random f32 tcgen05"],
            ["grouped_gemm rows 0+70", "rowwise,rowwise random f32 tcgen05"],
        ],
    );
    // The other architectures of this family have the same kernels.
    for (index, path) in [(2, " mma"), (7, "tcgen05"), (8, " mma")] {
        all_pass(index, &[["scaled_gemm 70x133x200 e4m3,e5m2 tensorwise,tensorwise random", path]]);
    }
}

/// Forward and backward of a linear on Burn's CUDA backend, with fusion, against the CPU's.
#[test]
fn linears() {
    all_pass(0, &[["linear tensorwise 37x70x45 F32 normal", ""], ["linear mxfp8 37x70x45 BF16 normal", ""]]);
    // The weight gradient of 16-bit matrices.
    all_pass(
        0,
        &[["linear rowwise_with_gw_hp 8x16x16 BF16 exact", ""], ["linear mxfp8_wgrad_with_hp 8x16x16 F16 normal", ""]],
    );
}

/// A mixture with two experts a token, whose operations Burn fuses, against the CPU.
#[test]
fn a_mixture_of_experts() {
    fn loss<B: Backend>() -> f32 {
        let mut config = DecoderConfig::preset("llama3-debug-moe").expect("a preset");
        config.dims.num_layers = 1;
        config.dims.vocab_size = 64;
        let model = Decoder::<B>::new(config, &B::Device::default()).expect("a valid size").init_weights(0);
        let ids = |step: usize| {
            let ids: Vec<_> = (0..32).map(|i| ((7 * i + step) % 64) as i32).collect();
            Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [1, 32]), &B::Device::default())
        };
        model.loss(ids(0), ids(7)).into_scalar().elem()
    }
    if client(0).is_some() {
        let (cuda, cpu) = (loss::<Cuda>(), loss::<Flex>());
        assert!((cuda - cpu).abs() < 1e-3 * cpu, "{cuda}, not {cpu}");
    }
}

/// A GEMM on a device with a fault.
fn gemm_with(index: usize, fault: Fault) -> Option<Result<f64, Failure>> {
    let (client, driver) = client(index)?;
    let gemm = Gemm { config: PRECISE, ..Gemm::new([64, 64, 128]) };
    assert_eq!(gemm_path(&client, [Granularity::Tensor; 2], PRECISE), GemmPath::Wgmma);
    driver.inject(index, &fault);
    let [a, b] = gemm.matrices();
    Some(caught(|| gemm.compare(&client, [&a, &b], Some(1.0))))
}

/// A launch that does nothing leaves poison, which the comparison sees.
#[test]
fn a_lost_launch_is_an_error() {
    let Some(done) = gemm_with(3, Fault::Lose("gemm".into())) else { return };
    assert!(matches!(done, Err(Failure::Wrong(_))), "{done:?}");
}

#[test]
fn a_refused_kernel_is_an_error() {
    let Some(done) = gemm_with(4, Fault::Refuse("gemm".into())) else { return };
    let error = done.unwrap_err().to_string();
    assert!(error.contains("Unable to load the PTX") && error.contains("CUDA_ERROR_INVALID_PTX"), "{error}");
}

/// CubeCL's thread panics, and the caller then has no answer.
#[test]
fn no_memory_is_an_error() {
    let Some(done) = gemm_with(5, Fault::Memory(4096)) else { return };
    assert!(matches!(&done, Err(Failure::Panicked(text)) if text.contains("CallError")), "{done:?}");
}

/// The kernel traps after ten seconds of its clock.
#[test]
fn a_barrier_without_its_arrivals_is_an_error() {
    let Some(done) = gemm_with(6, Fault::Stick("gemm".into())) else { return };
    let error = done.unwrap_err().to_string();
    assert!(error.contains("CUDA_ERROR_LAUNCH_FAILED"), "{error}");
}
