//! Peak bytes of one train step on the CPU above the bytes live before it, for the debug Llama and
//! a burn-nn encoder. Each row is measured in a separate process, so that rows share no live
//! memory.
use std::env::current_exe;
use std::process::{Command, Stdio};

use benches::table::Table;
use burn::backend::{Autodiff, Flex};
use burn::module::{AutodiffModule, Param};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::{Float8, Float8Config, set_default_config};
use serde_json::json;
use test_data::{Counting, normal};

use crate::mib;
use crate::model::{BATCH, Training, float8, plain};

const LLAMA: &str = "debug Llama";
const ENCODER: &str = "TransformerEncoder";
const PLAIN: &str = "plain";
const TENSORWISE: &str = "tensorwise";

/// Width of the encoder.
const D_MODEL: usize = 256;

/// Model, precision and dtype of hidden states.
type Name = [&'static str; 3];

fn names() -> impl Iterator<Item = Name> {
    let of = |model| {
        [PLAIN, TENSORWISE]
            .into_iter()
            .flat_map(move |precision| ["f32", "bf16"].map(|dtype| [model, precision, dtype]))
    };
    [LLAMA, ENCODER].into_iter().flat_map(of)
}

fn peak<B: AutodiffBackend, M: AutodiffModule<B>>(mut training: Training<B, M>) -> usize {
    // Creates the moments, which persist.
    training.step();
    Counting::peak_of(|| training.step())
}

/// Encoder with f32 parameters, except norms, which have the dtype of hidden states: Burn's norms
/// multiply in one dtype.
fn encoder<B: AutodiffBackend>(dtype: DType) -> TransformerEncoder<B> {
    let config = TransformerEncoderConfig::new(D_MODEL, 4 * D_MODEL, 4, 4).with_dropout(0.0);
    let mut encoder = config.init::<B>(&B::Device::default());
    let cast = |param: Param<Tensor<B, 1>>| param.map(|values| values.cast(dtype).detach().require_grad());
    for norm in encoder.layers.iter_mut().flat_map(|layer| [&mut layer.norm_1, &mut layer.norm_2]) {
        norm.gamma = cast(norm.gamma.clone());
        norm.beta = norm.beta.take().map(cast);
    }
    encoder
}

/// Training on the mean squared error of unrelated random values.
fn encoding<B: AutodiffBackend>(encoder: TransformerEncoder<B>, dtype: DType) -> Training<B, TransformerEncoder<B>> {
    let shape = [BATCH[0], BATCH[1], D_MODEL];
    let [x, target] = [1, 2].map(|seed| {
        let data = TensorData::new(normal(shape.iter().product(), seed), shape);
        Tensor::<B, 3>::from_data(data, &B::Device::default())
    });
    let x = x.cast(dtype);
    Training::new(encoder, move |encoder: &TransformerEncoder<B>| {
        let y = encoder.forward(TransformerEncoderInput::new(x.clone()));
        MseLoss::new().forward(y.cast(DType::F32), target.clone(), Reduction::Mean)
    })
}

/// Peak bytes of a row.
pub fn measure(name: &str) -> usize {
    type Plain = Autodiff<Flex>;
    type Fp8 = Float8<Autodiff<Flex>>;
    let [model, precision, dtype] = names().find(|row| row.join("/") == name).expect("the name of a row");
    let dtype = if dtype == "f32" { DType::F32 } else { DType::BF16 };
    let config = (precision == TENSORWISE).then(Float8Config::tensorwise);
    if precision == PLAIN && dtype == DType::F32 {
        return match model {
            LLAMA => peak(Training::llama(plain::<Plain>())),
            _ => peak(encoding(encoder::<Plain>(dtype), dtype)),
        };
    }
    // bf16 hidden states with f32 parameters need linears that mix dtypes: the decorator with FP8
    // off.
    set_default_config::<Fp8>(&Default::default(), None).expect("off is possible everywhere");
    match model {
        LLAMA => {
            let model = config.map_or_else(plain::<Fp8>, float8::<Fp8>);
            peak(Training::llama(model.with_compute_dtype(dtype)))
        }
        _ => {
            let mut encoder = encoder::<Fp8>(dtype);
            if let Some(config) = config {
                encoder = config.apply::<Fp8, _>(encoder).expect("an encoder has linears").0;
            }
            peak(encoding(encoder, dtype))
        }
    }
}

fn measure_alone(name: &str) -> usize {
    let program = current_exe().expect("this program lies somewhere");
    let output = Command::new(program).args(["--memory-row", name]).stderr(Stdio::inherit()).output();
    let output = output.expect("this program runs");
    assert!(output.status.success(), "{name}: {}", output.status);
    String::from_utf8_lossy(&output.stdout).trim().parse().expect("bytes")
}

/// Table by model, precision and dtype.
pub fn table() -> Table {
    let peaks: Vec<_> = names().map(|name| (name, measure_alone(&name.join("/")))).collect();
    let peak_of = |name: Name| peaks.iter().find(|(other, _)| *other == name).expect("every row was measured").1;
    let title = "peak memory of a train step on the CPU, 8 x 128 tokens, over what is alive before it; ratios to plain";
    let mut table = Table::new(title);
    for &([model, precision, dtype], peak_bytes) in &peaks {
        let to_plain = |dtype| peak_bytes as f64 / peak_of([model, PLAIN, dtype]) as f64;
        table.rows.push(json!({
            "model": model, "precision": precision, "dtype": dtype, "MiB": mib(peak_bytes), "to f32": to_plain("f32"),
            "to bf16": (dtype == "bf16").then(|| to_plain("bf16")),
        }));
    }
    table
}
