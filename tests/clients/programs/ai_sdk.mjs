// A tool loop of the Vercel AI SDK; its argument is the provider.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const prices = { tea: 3.5, cup: 8.25, pot: 12.75 };
const { OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY } = process.env;
const openai = { baseURL: OPENAI_BASE_URL, apiKey: OPENAI_API_KEY };
const providers = {
  compatible: createOpenAICompatible({ name: "policy", includeUsage: true, ...openai }),
  responses: createOpenAI(openai),
  anthropic: createAnthropic({ baseURL: `${ANTHROPIC_BASE_URL}/v1`, apiKey: ANTHROPIC_API_KEY }),
};
const options = {
  model: providers[process.argv[2]]("policy"),
  system: "You sell tea.",
  tools: {
    price: tool({
      description: "Look up the price of a product.",
      inputSchema: z.object({ product: z.string() }),
      execute: async ({ product }) => String(prices[product]),
    }),
  },
  stopWhen: isStepCount(5),
};

const messages = [{ role: "user", content: "What do tea, a cup and a pot cost together?" }];
const first = await generateText({ ...options, messages });
messages.push(...first.responseMessages, { role: "user", content: "And without the pot?" });
const second = streamText({ ...options, messages });
console.log(JSON.stringify([first.text, await second.text]));
