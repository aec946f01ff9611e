//! Llama 3's `tokenizer.model`: byte-pair ranks, one `BASE64 RANK` per line, as tiktoken reads
//! them. The special tokens and the expression that splits text into words are not in the file.
//! They come from the package `llama-models`.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use tiktoken_rs::{CoreBPE, Rank};

use super::SpecialTokens;

/// Number of ranks of Llama 3 to 3.3.
const RANKS: usize = 128_000;
/// Number of special tokens. Only the first ones have names.
const NUM_SPECIAL: usize = 256;
const NAMED: [&str; 12] = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
];
/// Reason for a file that is not text.
const NO_RANKS: &str = "it is no tokenizer.model of Llama 3, which is text, but looks like SentencePiece's: use the checkpoint's tokenizer.json";
/// Expression for one word.
const PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Maximum characters split at once, and maximum characters in a row that are all white space or
/// all not. In the original, words always end at these limits.
const MAX_CHARS: usize = 400_000;
const MAX_RUN: usize = 25_000;

/// Loaded ranks.
pub(super) struct Tiktoken {
    bpe: CoreBPE,
    special: HashMap<String, Rank>,
}

impl Tiktoken {
    /// Reads the ranks. `path` is used for errors.
    pub(super) fn from_bytes(bytes: Vec<u8>, path: &Path) -> Result<Self> {
        let text = String::from_utf8(bytes).map_err(|_| anyhow!("{}: {NO_RANKS}", path.display()))?;
        let mut ranks = HashMap::new();
        for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
            let at = format!("{}:{}", path.display(), i + 1);
            let (token, rank) = line.split_once(' ').with_context(|| format!("{at}: expected BASE64 RANK"))?;
            let token = STANDARD.decode(token).map_err(|error| anyhow!("{at}: {token:?} is not base64: {error}"))?;
            let rank: Rank = rank.parse().map_err(|_| anyhow!("{at}: {rank:?} is not a rank"))?;
            ensure!(rank as usize == ranks.len(), "{at}: rank {rank} where {} is expected", ranks.len());
            ensure!(ranks.insert(token, rank).is_none(), "{at}: an earlier line has this token");
        }
        let (path, found) = (path.display(), ranks.len());
        let problem = format!("{found} ranks, Llama 3's tokenizer.model has {RANKS}");
        ensure!(found == RANKS, "{path} has {problem}: use the checkpoint's tokenizer.json");
        if let Some(byte) = (0..=u8::MAX).find(|byte| !ranks.contains_key([*byte].as_slice())) {
            return Err(anyhow!("{path}: no line has the byte {byte:#04x}"));
        }
        let reserved = (2..).map(|i| format!("<|reserved_special_token_{i}|>"));
        let names = NAMED.into_iter().map(String::from).chain(reserved).take(NUM_SPECIAL);
        let special: HashMap<_, _> = names.zip(RANKS as Rank..).collect();
        let bpe = CoreBPE::new(ranks.into_iter().collect(), special.clone().into_iter().collect(), PATTERN);
        let bpe = bpe.expect("the expression is valid");
        Ok(Self { bpe, special })
    }

    pub(super) fn vocab_size(&self) -> usize {
        RANKS + NUM_SPECIAL
    }

    pub(super) fn id(&self, special: &str) -> Option<u32> {
        self.special.get(special).copied()
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        id as usize >= RANKS
    }

    pub(super) fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>> {
        let allowed: HashSet<&str> = match special {
            SpecialTokens::AreText => HashSet::new(),
            SpecialTokens::InText => self.bpe.special_tokens(),
        };
        let mut ids = vec![];
        for part in parts(text) {
            ids.extend(self.bpe.encode(part, &allowed).map_err(|error| anyhow!(error.message))?.0);
        }
        Ok(ids)
    }

    pub(super) fn bytes(&self, id: u32) -> Option<Vec<u8>> {
        self.bpe.decode_bytes(&[id]).ok()
    }
}

/// Pieces of a text that the original passes to tiktoken one by one.
fn parts(text: &str) -> Vec<&str> {
    let (mut parts, mut start) = (vec![], 0);
    let (mut chars, mut run, mut run_is_space) = (0, 0, None);
    for (i, c) in text.char_indices() {
        // Python's `str.isspace` adds these to White_Space.
        let is_space = c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}');
        run = if run_is_space == Some(is_space) { run + 1 } else { 1 };
        run_is_space = Some(is_space);
        if chars == MAX_CHARS || run > MAX_RUN {
            parts.push(&text[start..i]);
            start = i;
            chars = if chars == MAX_CHARS { 0 } else { chars };
            run = 1;
        }
        chars += 1;
    }
    parts.push(&text[start..]);
    parts
}
